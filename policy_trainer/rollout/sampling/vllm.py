"""Samples with vLLM in this process. The only file that imports vllm."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.pictures import decode
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import LoadedSampler, RunningBatch, SamplingParams
from policy_trainer.rollout.sampling.vllm_options import adapter_options, engine_options
from policy_trainer.rollout.sampling.vllm_requests import (
    RowOptions,
    adapter_name,
    completion_logps,
    make_completion,
    other_pictures,
    scoring_options,
    sequences,
    weights_mark,
)
from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from shared.batch import TokenGroup
from shared.client.retry import OnWait
from shared.errors import UserError
from shared.logprobs import placeholders_of
from shared.models import eos_token_ids, is_adapter, load_outline
from shared.spelling import spell_setting


class VllmSampler:
    """The engine has the weights of config.model until `load` replaces them."""

    @classmethod
    def from_config(
        cls, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora: LoraConfig
    ) -> LoadedSampler:
        cls.check_engine(config, lora.rank)
        model = load_outline(config.model, revision=config.revision)
        return cls(config, model, eos_token_ids(model, tokenizer), engine_options(config, model, lora.rank)), model

    @classmethod
    def check_engine(cls, config: CommonConfig, lora_rank: int) -> None:
        adapter_options(lora_rank)
        if find_spec("vllm") is None:
            raise UserError(
                "sampler: vllm is not installed here",
                f"pip install 'tandem-grpo[vllm]', or {spell_setting('sampler', 'vllm-server')} with a `vllm serve` "
                "in a separate environment: docs/vllm.md",
            )

    @classmethod
    def free_device(cls, config: CommonConfig) -> None:
        """Nothing to do: the engine lives in the worker, which puts it to sleep at the end of a turn or dies with
        it."""

    def __init__(
        self, config: CommonConfig, outline: PreTrainedModel, eos: Sequence[int], options: Mapping[str, Any]
    ) -> None:
        """outline: the model without its weights. eos: the ids that end a completion. options: see engine_options.

        Raises UserError for a model or settings that the engine refuses.
        """
        # Late: the trainer only checks that it is installed. Any: types are also checked where it is not.
        # import_module: this file has its name.
        vllm: Any = import_module("vllm")
        # The engine runs in this process: a killed worker would leave a child process behind.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with _explained(f"start with {config.model}"):
            self._engine: Any = vllm.LLM(
                model=config.model,
                worker_extension_cls=f"{PackedHead.__module__}.{PackedHead.__qualname__}",
                # On a CPU a seeded prompt that is prefilled in chunks ends vLLM 0.32's engine.
                enable_chunked_prefill=not vllm.platforms.current_platform.is_cpu(),
                **options,
            )
        self._make_params = vllm.SamplingParams
        self._placeholders = placeholders_of(outline)
        self._eos = eos
        self._salt: dict[str, str] = {}
        self._adapter: Any = None

    def load(self, model: Path) -> None:
        if is_adapter(model):  # vLLM reads it now; its prefix cache tells adapters apart by name
            number = self._adapter.lora_int_id + 1 if self._adapter else 1
            adapter = import_module("vllm.lora.request").LoRARequest(adapter_name(model), number, str(model))
            with _explained("load the run's adapter"):
                self._engine.llm_engine.add_lora(adapter)
            self._adapter = adapter
            return
        source = self._engine.model_config
        original = source.model, source.revision
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        finally:
            # vLLM regards this directory as its model now, and would load the processor from it, even if it is gone.
            source.model, source.revision = original
        self._engine.collective_rpc("pack_head")
        # Keys and values that were computed with these weights must not be reused by another version.
        self._salt = {"cache_salt": weights_mark(model)}
        self._engine.reset_prefix_cache()  # frees memory
        self._engine.llm_engine.reset_encoder_cache()  # what the vision tower had made of pictures

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        """The engine must not be used otherwise within the block. It raises UserError if the engine makes other tokens
        of pictures than the run's processor does."""
        options = RowOptions(params, self._eos, seed, self._placeholders)

        def request(row: int, prompt: EncodedPrompt, max_tokens: int) -> str:
            wanted = self._make_params(**options.of(row, max_tokens), detokenize=bool(params.stop))
            (number,) = self._engine.enqueue(
                [self._input(prompt)], [wanted], use_tqdm=False, lora_request=self._adapter
            )
            return number

        batch = VllmRunningBatch(self._engine.llm_engine, request, self._eos)
        try:
            yield batch
        finally:
            batch.abort()

    def _input(self, prompt: EncodedPrompt) -> dict[str, Any]:
        pictures = [decode(picture) for picture in prompt.pictures]
        data = {"multi_modal_data": {"image": pictures}} if pictures else {}
        return {"prompt_token_ids": prompt.unexpanded_ids, **data, **self._salt}

    def logps(self, group: TokenGroup) -> np.ndarray:
        rows = sequences(group)
        inputs = [{"prompt_token_ids": row, **self._salt} for row in rows]
        options = self._make_params(**scoring_options())
        answers = self._engine.generate(inputs, options, use_tqdm=False, lora_request=self._adapter)
        scored = (_token_logps(row[1:], answer.prompt_logprobs[1:]) for row, answer in zip(rows, answers, strict=True))
        return completion_logps(group, scored)

    def sleep(self) -> None:
        self._engine.sleep(level=1)  # level 2 would discard the weights, which may be sampled from again

    def wake_up(self) -> None:
        self._engine.wake_up()


class VllmRunningBatch:
    """Each row is a request. `advance` computes one step of the engine."""

    def __init__(self, engine: Any, request: Callable[[int, EncodedPrompt, int], str], eos: Sequence[int]) -> None:
        """request: sends a row's prompt and its max_tokens, and returns the id of the request within the engine. eos:
        the ids that end a completion."""
        self._engine = engine
        self._request = request
        self._eos = eos
        # By the id that is in the answer.
        self._rows: dict[str, tuple[int, EncodedPrompt, str]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        for row in rows:
            inner = self._request(row, prompt, max_tokens)
            self._rows[inner.partition("-")[0]] = row, prompt, inner  # vLLM has appended "-" and random characters

    def advance(self) -> list[tuple[int, Completion]]:
        if not self._rows:
            return []
        return [self._ended(answer) for answer in self._engine.step() if answer.finished]

    def _ended(self, answer: Any) -> tuple[int, Completion]:
        row, prompt, _ = self._rows.pop(answer.request_id)
        _check_pictures(prompt, answer)
        return row, _completion(answer.outputs[0], self._eos)

    def abort(self) -> None:
        """Ends the rows that are left."""
        self._engine.abort_request([inner for _, _, inner in self._rows.values()], internal=True)
        self._rows.clear()


def _check_pictures(prompt: EncodedPrompt, answer: Any) -> None:
    if problem := other_pictures(prompt, answer.prompt_token_ids):
        raise UserError(f"sampler: vLLM does not see what the run does: {problem}")


def _completion(output: Any, eos: Sequence[int]) -> Completion:
    logps = _token_logps(output.token_ids, output.logprobs)
    return make_completion(output.token_ids, logps, output.finish_reason, eos)


def _token_logps(ids: Sequence[int], steps: Sequence[Any]) -> list[float]:
    """The log-prob of each token, from vLLM's table of its alternatives."""
    return [alternatives[token].logprob for token, alternatives in zip(ids, steps, strict=True)]


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Turns vLLM's error for a model, an adapter or settings that it cannot use into a UserError."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"sampler: vLLM cannot {action}: {reason}") from error
