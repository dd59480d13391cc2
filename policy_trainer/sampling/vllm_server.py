"""Samples with a running `vllm serve`, over HTTP: token ids go there, and token ids with log-probs come back."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from policy_trainer.data.completion import Completion
from policy_trainer.sampling.sampler import SamplingParams, WeightsLost
from policy_trainer.sampling.vllm_adapters import adapter_name, adapter_refusal, load_adapter, unload_adapter
from policy_trainer.sampling.vllm_client import (
    Malformed,
    Refused,
    Unavailable,
    VllmClient,
    all_of,
    ask,
    parsed,
    persist,
)
from policy_trainer.sampling.vllm_requests import (
    ENDS,
    Choice,
    Completions,
    completion_logps,
    make_completion,
    make_group,
    sampling_options,
    scoring_options,
    sequences,
    weights_mark,
)
from policy_trainer.sampling.vllm_weights import FIRST, Loaded, load_whole, refusal, version
from shared.batch import TokenGroup
from shared.client.connection import OnWait
from shared.errors import UserError
from shared.models import is_adapter

# Sees to it that a server computes.
Ready = Callable[[VllmClient], Awaitable[None]]


async def always(client: VllmClient) -> None:
    """Of a server that never sleeps."""


async def awake(client: VllmClient) -> None:
    try:
        await client.post("/wake_up")
    except Refused as error:
        if error.status < 500:
            raise
        raise Unavailable(str(error)) from None  # its engine has died, or lacks memory


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


class VllmServerSampler:
    """Several may share a server: completions under way when another one loads weights go on with those."""

    def __init__(
        self, url: str, name: str, eos: Sequence[int], vocabulary: int, on_wait: OnWait, ready: Ready = always
    ) -> None:
        """name: of the served model. eos: the ids that end a completion. vocabulary: rows of the model's embedding.
        ready: what comes before other requests."""
        self._url = url
        self._name = name
        self._eos = eos
        self._vocabulary = vocabulary
        self._on_wait = on_wait
        self._ready = ready
        self._loaded = Loaded(name)
        self._adapters: list[str] = []

    def load(self, model: Path) -> None:
        """Raises UserError if the server refuses the weights, FileNotFoundError if they are gone meanwhile."""
        load, words = (self._load_adapter, adapter_refusal) if is_adapter(model) else (self._load_whole, refusal)

        async def work(client: VllmClient) -> Loaded:
            await self._ready(client)
            return await load(client, model)

        try:
            self._loaded = persist(self._url, work, self._on_wait)
        except Refused as error:
            if not model.exists():
                raise FileNotFoundError(str(model)) from None
            raise UserError(words(self._url, error)) from None

    async def _load_whole(self, client: VllmClient, model: Path) -> Loaded:
        mark = weights_mark(model)
        await load_whole(client, model, mark)
        return Loaded(self._name, mark, {"cache_salt": mark})

    async def _load_adapter(self, client: VllmClient, model: Path) -> Loaded:
        """vLLM keeps adapters apart by name, in its prefix cache, too. The one before stays: others may use it."""
        if await version(client) != FIRST:
            raise UserError(f"vllm_url: {self._others()}: start it again")
        name = adapter_name(model)
        await load_adapter(client, name, model)
        older = [other for other in self._adapters if other != name]
        for other in older[:-1]:
            await unload_adapter(client, other)
        self._adapters = [*older[-1:], name]
        return Loaded(name)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        """Raises WeightsLost if the server does not have the weights that were loaded last."""
        options = [sampling_options(params, self._eos, seed, number) for number in range(len(prompts))]

        answers = self._ask(prompts, options)
        return [make_group([self._completion(choice) for choice in answer], params) for answer in answers]

    def logps(self, group: TokenGroup) -> np.ndarray:
        """As `sample`."""
        rows = sequences(group)
        answers = self._ask(rows, [scoring_options()] * len(rows))
        with self._refusals():
            return completion_logps(
                group, [_own_logps(row, choices[0]) for row, choices in zip(rows, answers, strict=True)]
            )

    def sleep(self) -> None:
        put_to_sleep(self._url)

    def wake_up(self) -> None:
        """Every request does, since the server may be another one by then: see `awake`."""

    def _ask(self, prompts: Sequence[Sequence[int]], options: Sequence[Mapping[str, Any]]) -> list[list[Choice]]:
        """The choices that the server answers to each prompt, in their order. All are asked for again if one fails."""

        async def work(client: VllmClient) -> list[list[Choice]]:
            await self._ready(client)
            await self._check_weights(client)
            return await all_of(
                self._choices(client, list(ids), own) for ids, own in zip(prompts, options, strict=True)
            )

        with self._refusals():
            return persist(self._url, work, self._on_wait)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            raise UserError(
                f"vllm_url: the vLLM server at {self._url} does not complete a prompt: {error}; check that vLLM 0.32 "
                "or newer is there, with the run's model"
            ) from None

    async def _check_weights(self, client: VllmClient) -> None:
        """A server that was restarted has the weights that it began with, and would sample as if nothing had been."""
        try:
            found = await version(client)
        except Refused as error:
            if self._loaded.version == FIRST and error.status == 404:
                return  # without its development mode nobody can have replaced them
            raise
        if found != self._loaded.version:
            raise WeightsLost(f"vllm_url: {self._others()}")

    def _others(self) -> str:
        return (
            f"the vLLM server at {self._url} has other weights than those that were loaded: it was restarted, or "
            "another run uses it; give each run a server of its own"
        )

    async def _choices(self, client: VllmClient, prompt: list[int], options: Mapping[str, Any]) -> list[Choice]:
        loaded = self._loaded
        body = {"model": loaded.model, "prompt": prompt, "return_token_ids": True, **loaded.salt, **options}
        try:
            choices = parsed(await client.post("/v1/completions", body), Completions).choices
        except Refused as error:
            if error.status == 404 and loaded.model != self._name:
                raise WeightsLost(f"vllm_url: {self._others()}") from None
            if error.status < 500:
                raise
            raise Unavailable(str(error)) from None  # its engine has died, and the server ends, too
        if stopped := [choice.finish_reason for choice in choices if choice.finish_reason not in ENDS]:
            raise Unavailable(f"it ended a completion by {stopped[0]!r}")
        self._check(choices, options)
        return choices

    def _check(self, choices: Sequence[Choice], options: Mapping[str, Any]) -> None:
        """Raises Malformed for an answer that does not fit the request."""
        if len(choices) != options.get("n", 1):
            raise Malformed(f"its answer has {len(choices)} completions instead of {options.get('n', 1)}")
        for choice in choices:
            length, known = len(choice.token_ids), len(choice.logps)
            if not 0 < length <= options["max_tokens"]:
                raise Malformed(f"its answer has {length} tokens instead of 1 to {options['max_tokens']}")
            if "logprobs" in options and known != length:
                raise Malformed(f"its answer has {known} log-probs for a completion of {length} tokens")
            if max(choice.token_ids) >= self._vocabulary:
                raise Malformed(f"its answer has token {max(choice.token_ids)} of {self._vocabulary}")

    def _completion(self, choice: Choice) -> Completion:
        assert choice.finish_reason is not None
        return make_completion(choice.token_ids, choice.logps, choice.finish_reason, self._eos)


def _own_logps(ids: Sequence[int], choice: Choice) -> list[float]:
    """The log-probs of a prompt's tokens but for the first, from vLLM's table of each token's alternatives.

    Raises Malformed if one is missing.
    """
    steps = choice.prompt_logprobs or []
    if len(steps) != len(ids):
        raise Malformed(f"its answer has log-probs of {len(steps)} of {len(ids)} tokens")
    logps = [(step or {}).get(str(token)) for token, step in zip(ids[1:], steps[1:], strict=True)]
    if None in logps:
        raise Malformed("its answer lacks the log-prob of a token of the prompt")
    return [found.logprob for found in logps if found]
