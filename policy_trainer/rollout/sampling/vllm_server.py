"""Samples with a running `vllm serve`, over HTTP: token ids go there, and token ids with log-probs come back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import LoadedSampler, RunningBatch, SamplingParams, WeightsLost
from policy_trainer.rollout.sampling.vllm_client import (
    Refused,
    Unavailable,
    VllmClient,
    all_of,
    answer_field,
    ask,
    check_server,
    check_sleep_mode,
    check_takes_adapters,
    parsed,
    persist,
)
from policy_trainer.rollout.sampling.vllm_options import longest_sequence
from policy_trainer.rollout.sampling.vllm_requests import (
    ENDS,
    Choice,
    Completions,
    RowOptions,
    adapter_name,
    completion_logps,
    completion_request,
    make_completion,
    other_pictures,
    scoring_options,
    sequences,
    weights_mark,
)
from policy_trainer.rollout.sampling.vllm_running import Request, ServerRunningBatch
from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from shared.batch import TokenGroup
from shared.client.retry import OnWait
from shared.errors import UserError
from shared.logprobs import placeholders_of
from shared.models import embedding_rows, eos_token_ids, is_adapter, load_outline
from shared.spelling import spell_setting

# vLLM's name for the weights that a server starts with.
_FIRST_VERSION = "default"
_PACK_HEAD = "pack_head"


class VllmServerSampler:
    """Several samplers may share a server: when one loads weights, completions in progress continue with the new
    weights."""

    def __init__(
        self,
        url: str,
        name: str,
        eos: Sequence[int],
        vocabulary: int,
        on_wait: OnWait,
        *,
        placeholders: Sequence[int] = (),
        sleep_mode: bool = False,
    ) -> None:
        """name: of the served model. eos: the ids that end a completion. vocabulary: rows of the model's embedding.
        placeholders: ids of pictures, which are not sampled. sleep_mode: the server may be asleep,
        and is woken before other requests."""
        self._url = url
        self._name = name
        self._eos = eos
        self._vocabulary = vocabulary
        self._placeholders = placeholders
        self._on_wait = on_wait
        self._sleep_mode = sleep_mode
        # What requests need: the model's name in them, and the version of the weights that the server must have.
        self._model, self._version = name, _FIRST_VERSION
        self._adapters: list[str] = []

    @classmethod
    def from_config(
        cls, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora: LoraConfig
    ) -> LoadedSampler:
        model = load_outline(config.model, revision=config.revision)
        sampler = cls(
            _url(config),
            _checked_name(config, model, lora.rank),
            eos_token_ids(model, tokenizer),
            embedding_rows(model),
            on_wait,
            placeholders=placeholders_of(model),
            sleep_mode=config.vllm.enable_sleep_mode,
        )
        return sampler, model

    @classmethod
    def check_engine(cls, config: CommonConfig, lora_rank: int) -> None:
        _checked_name(config, load_outline(config.model, revision=config.revision), lora_rank)

    @classmethod
    def free_device(cls, config: CommonConfig) -> None:
        """The server may have been started a moment ago, or its worker killed."""
        put_to_sleep(_url(config))

    def load(self, model: Path) -> None:
        """Raises UserError if the server refuses the weights, FileNotFoundError if they have been removed meanwhile."""
        adapter = is_adapter(model)
        load = self._load_adapter if adapter else self._load_whole

        async def work(client: VllmClient) -> tuple[str, str]:
            await self._wake(client)
            return await load(client, model)

        try:
            self._model, self._version = persist(self._url, work, self._on_wait)
        except Refused as error:
            if not model.exists():
                raise FileNotFoundError(str(model)) from None
            explain = _explain_refused_adapter if adapter else _explain_refused_weights
            raise UserError(explain(self._url, error)) from None

    async def _wake(self, client: VllmClient) -> None:
        """Before every request: the server may have been restarted or put to sleep since the last one."""
        if not self._sleep_mode:
            return
        try:
            await client.post("/wake_up")
        except Refused as error:
            if error.status < 500:
                raise
            raise Unavailable(str(error)) from None  # its engine has died, or lacks memory

    async def _load_whole(self, client: VllmClient, model: Path) -> tuple[str, str]:
        """Loads whole weights unless another worker of the run already has. Completions in progress wait."""
        mark = weights_mark(model)
        if await weights_version(client) == mark:
            await client.post("/resume")  # a worker that was killed may have left the server paused
            return self._name, mark
        await client.post("/pause", mode="keep")
        try:
            await client.post("/update_weight_version", {"new_version": ""})  # from here on the weights may be mixed
            await _rpc(client, "reload_weights", weights_path=str(model.resolve()))
            if await client.config("device_config", "device", kind=str) == "cpu":
                await _rpc(client, _PACK_HEAD)
            await client.post("/update_weight_version", {"new_version": mark})
            await client.post("/reset_prefix_cache")  # frees memory; where it cannot, the salt keeps versions apart
        finally:
            await client.post("/resume")
        return self._name, mark

    async def _load_adapter(self, client: VllmClient, model: Path) -> tuple[str, str]:
        """vLLM identifies adapters by name, also in its prefix cache. The previous one stays: other workers may use
        it."""
        if await weights_version(client) != _FIRST_VERSION:
            raise UserError(f"vllm_url: {self._other_weights()}", "start it again")
        name = adapter_name(model)
        await load_adapter(client, name, model)
        older = [other for other in self._adapters if other != name]
        for other in older[:-1]:
            await unload_adapter(client, other)
        self._adapters = [*older[-1:], name]
        return name, _FIRST_VERSION

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        """Raises WeightsLost if the server does not have the weights that were loaded last, UserError if it makes other
        tokens of pictures than the run's processor does."""

        async def complete(client: VllmClient, request: Request, ended: Callable[[int, Completion], None]) -> None:
            async def complete_row(row: int, options: Mapping[str, Any]) -> None:
                (choice,) = await self._choices(client, request.prompt, options)
                ended(row, self._completion(choice))

            with self._explained():
                await self._wake(client)
                await self._check_weights(client)
                await all_of(complete_row(row, options) for row, options in request.options.items())

        options = RowOptions(params, self._eos, seed, self._placeholders)
        batch = ServerRunningBatch(self._url, complete, options, self._on_wait)
        try:
            yield batch
        finally:
            batch.close()

    def logps(self, group: TokenGroup) -> np.ndarray:
        """Raises WeightsLost like a running batch."""
        rows = sequences(group)
        answers = self._complete([EncodedPrompt(row) for row in rows], [scoring_options()] * len(rows))
        with self._explained():
            return completion_logps(
                group, [_prompt_logps(row, choices[0]) for row, choices in zip(rows, answers, strict=True)]
            )

    def sleep(self) -> None:
        put_to_sleep(self._url)

    def wake_up(self) -> None:
        """Nothing to do: every request wakes the server."""

    def _complete(self, prompts: Sequence[EncodedPrompt], options: Sequence[Mapping[str, Any]]) -> list[list[Choice]]:
        """The server's choices for each prompt, in order. If one request fails, all are repeated."""

        async def work(client: VllmClient) -> list[list[Choice]]:
            await self._wake(client)
            await self._check_weights(client)
            return await all_of(
                self._choices(client, prompt, prompt_options)
                for prompt, prompt_options in zip(prompts, options, strict=True)
            )

        with self._explained():
            return persist(self._url, work, self._on_wait)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            raise UserError(
                f"vllm_url: the vLLM server at {self._url} does not complete a prompt: {error}",
                "check that vLLM 0.32 or newer is there, with the run's model",
            ) from None

    async def _check_weights(self, client: VllmClient) -> None:
        """A restarted server has its initial weights, and would sample from them without any error."""
        try:
            version = await weights_version(client)
        except Refused as error:
            if self._version == _FIRST_VERSION and error.status == 404:
                return  # without its development mode they cannot be replaced
            raise
        if version != self._version:
            raise WeightsLost(f"vllm_url: {self._other_weights()}")

    def _other_weights(self) -> str:
        return (
            f"the vLLM server at {self._url} has other weights than those that were loaded: it was restarted, or "
            "another run uses it; give each run its own server"
        )

    async def _choices(self, client: VllmClient, prompt: EncodedPrompt, options: Mapping[str, Any]) -> list[Choice]:
        path, body = completion_request(prompt, options)
        body["model"] = self._model
        if self._version != _FIRST_VERSION:  # keys and values that were computed with other weights are not reused
            body["cache_salt"] = self._version
        try:
            answer = parsed(await client.post(path, body), Completions)
        except Refused as error:
            if error.status == 404 and self._model != self._name and self._model in str(error):
                raise WeightsLost(f"vllm_url: {self._other_weights()}") from None
            if error.status < 500:
                raise
            raise Unavailable(str(error)) from None  # its engine has died, and the server exits, too
        if problem := other_pictures(prompt, answer.prompt_token_ids or []):
            raise Refused(f"{problem}, and `--mm-processor-kwargs` with the run's data.min_pixels and data.max_pixels")
        choices = answer.choices
        if stopped := [choice.finish_reason for choice in choices if choice.finish_reason not in ENDS]:
            raise Unavailable(f"it ended a completion by {stopped[0]!r}")
        self._check(choices, options)
        return choices

    def _check(self, choices: Sequence[Choice], options: Mapping[str, Any]) -> None:
        """Raises Refused for an answer that does not fit the request."""
        if len(choices) != 1:
            raise Refused(f"its answer has {len(choices)} completions instead of 1")
        for choice in choices:
            length, known = len(choice.token_ids), len(choice.logps)
            if not 0 < length <= options["max_tokens"]:
                raise Refused(f"its answer has {length} tokens instead of 1 to {options['max_tokens']}")
            if "logprobs" in options and known != length:
                raise Refused(f"its answer has {known} log-probs for a completion of {length} tokens")
            if max(choice.token_ids) >= self._vocabulary:
                raise Refused(f"its answer has token {max(choice.token_ids)} of {self._vocabulary}")

    def _completion(self, choice: Choice) -> Completion:
        assert choice.finish_reason is not None
        return make_completion(choice.token_ids, choice.logps, choice.finish_reason, self._eos)


def _url(config: CommonConfig) -> str:
    assert config.vllm_url is not None
    return config.vllm_url.rstrip("/")


def _checked_name(config: CommonConfig, model: PreTrainedModel, lora_rank: int) -> str:
    """The server's name for the model. Raises UserError for a server that cannot be used."""
    url = _url(config)
    name = check_server(url, config.model, longest_sequence(config, model), lora_rank)
    if config.vllm.enable_sleep_mode:
        check_sleep_mode(url)
    if lora_rank:
        check_takes_adapters(url, lora_rank)
    return name


def _prompt_logps(ids: Sequence[int], choice: Choice) -> list[float]:
    """The log-probs of a prompt's tokens except the first, from vLLM's table of each token's alternatives.

    Raises Refused if one is missing.
    """
    steps = choice.prompt_logprobs or []
    if len(steps) != len(ids):
        raise Refused(f"its answer has log-probs of {len(steps)} of {len(ids)} tokens")
    logps = [(step or {}).get(str(token)) for token, step in zip(ids[1:], steps[1:], strict=True)]
    if None in logps:
        raise Refused("its answer lacks the log-prob of a token of the prompt")
    return [alternative.logprob for alternative in logps if alternative]


def put_to_sleep(url: str) -> None:
    """Weights go to main memory, keys and values are dropped. Completions of a worker that was killed are aborted.

    A server that does not answer uses no device. Raises UserError for one that refuses.
    """
    try:
        ask(url, lambda client: client.post("/sleep", level="1"))
    except Unavailable:
        return
    except Refused as error:
        raise UserError(f"vllm.enable_sleep_mode: the vLLM server at {url} does not go to sleep: {error}") from None


async def weights_version(client: VllmClient) -> str:
    """The version of the server's weights. Raises Refused, status 404, without its development mode."""
    return answer_field(await client.get("/weight_info"), "weight_version", kind=str)


async def _rpc(client: VllmClient, method: str, **arguments: str) -> None:
    await client.post("/collective_rpc", {"method": method, "kwargs": arguments})


def _explain_refused_weights(url: str, error: Refused) -> str:
    if error.status == 404:
        return (
            f"vllm_url: the vLLM server at {url} takes no new weights: start it with VLLM_SERVER_DEV_MODE=1 in its "
            "environment, as docs/vllm.md shows; vLLM 0.32 or newer"
        )
    if _PACK_HEAD in str(error):
        return (
            f"vllm_url: the vLLM server at {url} is on a CPU, where it would keep the old LM head: start it with "
            f"`--worker-extension-cls {PackedHead.__module__}.{PackedHead.__qualname__}`, as docs/vllm.md shows"
        )
    return f"vllm_url: the vLLM server at {url} cannot load the weights: {error}"


async def load_adapter(client: VllmClient, name: str, directory: Path) -> None:
    """Loads the adapter, unless another worker of the same run has done so. Completions in progress keep theirs."""
    try:
        await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory.resolve())})
    except Refused as error:
        if "already been loaded" not in str(error):
            raise


async def unload_adapter(client: VllmClient, name: str) -> None:
    """Completions in progress keep it."""
    try:
        await client.post("/v1/unload_lora_adapter", {"lora_name": name})
    except Refused as error:
        if error.status != 404:  # another worker has done so
            raise


def _explain_refused_adapter(url: str, error: Refused) -> str:
    return (
        f"vllm_url: the vLLM server at {url} cannot load the adapter: {error}; it must accept the run's rank and "
        "layers (docs/vllm.md has the command), and find the adapter under the worker's path; "
        f"{spell_setting('sampler', 'hf')} accepts any"
    )
