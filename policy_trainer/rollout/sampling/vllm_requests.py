"""Requests to vLLM and its answers: options, completions and adapters, the same in process and over HTTP."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, model_validator

from policy_trainer.data.completion import Completion, TokenId
from policy_trainer.data.pictures import data_url
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import SamplingParams
from policy_trainer.weights.adapters import WEIGHTS
from shared.batch import MAX_LOGP, TokenGroup
from shared.models import ADAPTER_CONFIG

# The finish_reasons of whole completions: by an EOS or a stop text, and at the length limit.
ENDS = ("stop", "length")

Logp = Annotated[float, Field(le=MAX_LOGP, allow_inf_nan=False)]


def other_pictures(prompt: EncodedPrompt, seen: Sequence[int]) -> str:
    """Why the engine does not see a prompt's pictures as the server and the trainer do; empty if it does.

    seen: the engine's ids of the prompt, in which it expanded the placeholders.
    """
    if not prompt.pictures or list(seen) == prompt.ids:
        return ""
    return (
        f"its processor turns a prompt with pictures into other tokens ({len(seen)}) than the run's ({len(prompt)}); "
        "it needs the same version of transformers"
    )


class _Alternative(BaseModel):
    logprob: Logp


def _plain_logps(logps: Any) -> Any:
    """The route for prompts with pictures gives an object for each token."""
    if not isinstance(logps, list):
        return logps or []
    return [item.get("logprob") if isinstance(item, dict) else item for item in logps]


class Choice(BaseModel):
    """A completion in an answer over HTTP. logps: of its tokens. prompt_logprobs: by token id. Both if requested."""

    index: int
    finish_reason: str | None
    token_ids: list[TokenId]
    logps: Annotated[list[Logp], BeforeValidator(_plain_logps)] = Field(
        [], validation_alias=AliasChoices(AliasPath("logprobs", "token_logprobs"), AliasPath("logprobs", "content"))
    )
    prompt_logprobs: list[dict[str, _Alternative] | None] | None = None


class Completions(BaseModel):
    """The answer to a prompt over HTTP. prompt_token_ids: only of one with pictures, with its placeholders expanded."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    prompt_token_ids: list[TokenId] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> "Completions":
        self.choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in self.choices] != [*range(len(self.choices))]:
            raise ValueError("the choices' indexes must be 0, 1, 2, …")
        return self


def completion_request(prompt: EncodedPrompt, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The route of vLLM's server that completes a prompt, and the request's body."""
    if not prompt.pictures:
        return "/v1/completions", {"prompt": prompt.ids, "return_token_ids": True, **options}
    return "/inference/v1/generate", {
        "token_ids": prompt.unexpanded_ids,
        "content_parts": [{"type": "image_url", "url": data_url(picture)} for picture in prompt.pictures],
        "return_token_ids": True,
        "sampling_params": dict(options),
    }


class RowOptions:
    """The options of requests for a completion of one row. A row has another seed each time."""

    def __init__(self, params: SamplingParams, eos: Sequence[int], seed: int, placeholders: Sequence[int] = ()) -> None:
        """eos: the ids that end a completion; vLLM would also end at others. placeholders: ids of pictures, which are
        not sampled; the log-probs are those of the other tokens among themselves, where hf's are among all."""
        self._params = params
        self._eos = eos
        self._seed = seed
        self._forbidden = {"logit_bias": dict.fromkeys(placeholders, -100.0)} if placeholders else {}
        self._requests: Counter[int] = Counter()

    def of(self, row: int, max_tokens: int) -> dict[str, Any]:
        """By the names of vLLM's SamplingParams and of its HTTP API. All that a model's generation_config.json could
        change is given."""
        self._requests[row] += 1
        seed = int(np.random.SeedSequence((self._seed, row)).generate_state(1)[0])
        params = self._params
        return {
            "n": 1,
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": int(np.random.SeedSequence((seed, self._requests[row])).generate_state(1)[0]),
            "stop": list(params.stop),
            "stop_token_ids": [*self._eos, *params.stop_token_ids],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 0,  # of the sampled tokens only
            **self._forbidden,
        }


def scoring_options() -> dict[str, Any]:
    """The options that ask for the log-probs of a prompt's tokens: of all tokens, at temperature 1."""
    return {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}


def sequences(group: TokenGroup) -> list[list[int]]:
    """The group's prompt with each of its completions, which vLLM scores as prompts."""
    prompt = group.prompt_ids.tolist()
    return [prompt + completion.tolist() for completion in group.completions()]


def completion_logps(group: TokenGroup, scored: Iterable[Sequence[float]]) -> np.ndarray:
    """(C,) float32. scored: the log-probs of the tokens of each of `sequences`, but for the first token."""
    lengths = group.completion_lengths
    return np.concatenate([np.array(row[-n:], np.float32) for row, n in zip(scored, lengths, strict=True)])


def make_completion(ids: Sequence[int], logps: Sequence[float], reason: str, eos: Sequence[int]) -> Completion:
    """reason: vLLM's finish_reason, one of ENDS."""
    assert reason in ENDS, f"vLLM ended a completion by {reason!r}"
    return Completion(
        np.array(ids, np.int64), np.array(logps, np.float32), finished=reason == "stop", eos=ids[-1] in eos
    )


def weights_mark(model: Path) -> str:
    """Identifies published weights by their files' inodes and times, whatever the directory's name.

    Raises FileNotFoundError if there are none.
    """
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no weights in {model}")
    stats = [file.stat() for file in files]
    return sha256(repr([(stat.st_ino, stat.st_mtime_ns) for stat in stats]).encode()).hexdigest()[:16]


def adapter_name(directory: Path) -> str:
    """The same for all copies of an adapter, so that workers with copies of their own share it on a server.

    Raises FileNotFoundError if it is gone.
    """
    digests = [sha256(file.read_bytes()).digest() for file in (directory / ADAPTER_CONFIG, directory / WEIGHTS)]
    return f"lora-{sha256(b''.join(digests)).hexdigest()[:16]}"
