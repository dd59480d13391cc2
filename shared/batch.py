"""The messages of the system: a batch, and what a training step made of it.

A batch is one prompt, the G completions sampled for it and their raw rewards; the server adds log-probs by its models.
Completions differ in length and are concatenated: C is the sum of their lengths, P the length of the prompt. A batch is
checked once, when it is built.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from shared.sampling_mask import SamplingMask

Array = NDArray[Any]

# Bounds of a batch's numbers: server, client and trainer refuse values beyond them, which could break a step.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Logits are divided by it in float32: beyond these it makes them infinite, or all equal."""

MAX_REWARD = 1e6
"""The largest magnitude of a reward: squares and weighted sums of larger ones could overflow float32."""

MAX_LOGP = 1e-3
"""The largest log-prob that is accepted: 0, plus a tolerance for rounding."""

MAX_INDEX = 10**12
"""The largest index of a problem: a run goes on from the one after it."""

MAX_NAME_CHARACTERS = 200
# The pattern of a lineage, which is also part of URLs and of directory names.
LINEAGE = "[A-Za-z0-9._-]{1,200}"
MAX_SAMPLE_BYTES = 16 * 1024
MAX_IMAGE_TENSORS = 8
MAX_IMAGE_DIMENSIONS = 5
_IMAGE_DTYPES = (np.float32, np.uint8, np.int64)


class BatchError(ValueError):
    """A batch is invalid. `field` names the tensor or metadata key, the message what is required."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclass(frozen=True, eq=False)
class TokenGroup:
    """The input of a forward for one group: a prompt, the completions that share it, and the prompt's images.

    prompt_ids: int64 (P,), P >= 1. completion_ids: int64 (C,). completion_lengths: int64 (G,), each >= 1, sum C.
    images: float32, uint8 or int64 tensors by the names that the model's own forward gives them, such as pixel_values
    and image_grid_thw; empty for a text prompt. prompt_ids then contain a placeholder token for each image feature.
    sampling_mask: the tokens that top-k, top-p or min-p kept for each of the C tokens; None if none was left out.
    Log-probs and entropies are of the distribution over the kept tokens. teacher_prompt_ids: int64 (P',), what a
    teacher reads in place of the prompt; None: the same prompt.
    """

    prompt_ids: Array
    completion_ids: Array
    completion_lengths: Array
    images: Mapping[str, Array] = field(default_factory=dict)
    sampling_mask: SamplingMask | None = None
    teacher_prompt_ids: Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", MappingProxyType(dict(self.images)))
        _check_images(self.images)
        named = ["prompt_ids", "completion_ids", "completion_lengths"]
        for name in named if self.teacher_prompt_ids is None else [*named, "teacher_prompt_ids"]:
            check_tensor(name, getattr(self, name), np.int64)
            if not len(getattr(self, name)):
                raise BatchError(name, "must not be empty")
        total = len(self.completion_ids)
        # Check each length before the sum, which could overflow otherwise.
        if self.completion_lengths.min() < 1 or self.completion_lengths.max() > total:
            raise BatchError("completion_lengths", f"must each lie in [1, {total}], the number of completion tokens")
        if self.completion_lengths.sum() != total:
            raise BatchError(
                "completion_lengths",
                f"must sum to the {total} tokens of completion_ids, got {self.completion_lengths.sum()}",
            )
        if self.sampling_mask is not None:
            _check_sampling_mask(self.sampling_mask, self.completion_ids)

    @property
    def size(self) -> int:
        """G, the number of completions."""
        return len(self.completion_lengths)

    @property
    def tokens(self) -> int:
        """P + C: the tokens of a forward pass that computes the prompt once."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def longest_prompt(self) -> int:
        """P, or P' if a teacher reads a longer prompt."""
        return max(len(self.prompt_ids), 0 if self.teacher_prompt_ids is None else len(self.teacher_prompt_ids))

    def for_reference(self) -> "TokenGroup":
        """The group as the reference reads it."""
        return self if self.teacher_prompt_ids is None else replace(self, teacher_prompt_ids=None)

    def for_teacher(self) -> "TokenGroup":
        """The group as a teacher reads it."""
        if self.teacher_prompt_ids is None:
            return self
        return replace(self, prompt_ids=self.teacher_prompt_ids, teacher_prompt_ids=None)

    def check_ids(self, vocabulary: int, whose: str) -> None:
        """Raises BatchError unless every id lies in [0, vocabulary). whose: names the vocabulary in the message."""
        kept = self.completion_ids if self.sampling_mask is None else self.sampling_mask.token_ids
        named = {
            "prompt_ids": self.prompt_ids,
            "completion_ids": self.completion_ids,
            "sampling_mask_ids": kept,
            "teacher_prompt_ids": self.teacher_prompt_ids,
        }
        for name, ids in named.items():
            if ids is not None and len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
                raise BatchError(name, f"must lie in [0, {vocabulary}), {whose}")

    @property
    def image_bytes(self) -> int:
        """Bytes of all image tensors."""
        return sum(tensor.nbytes for tensor in self.images.values())

    @property
    def longest_row(self) -> int:
        """P + the longest completion: must fit the model's context."""
        return len(self.prompt_ids) + int(self.completion_lengths.max())

    def completions(self) -> list[Array]:
        """The token ids of each completion: G arrays, int64."""
        return self.split(self.completion_ids)

    def split(self, values: Array) -> list[Array]:
        """(C, ...) values of all completion tokens -> those of each completion."""
        return np.split(values, np.cumsum(self.completion_lengths)[:-1])

    def halves(self) -> "list[TokenGroup]":
        """Two groups with half of the completions each, in order; a group of one completion is returned whole."""
        return self.divided(min(2, self.size))

    def divided(self, count: int) -> "list[TokenGroup]":
        """Groups with almost equal numbers of the completions, in order. count: at most G."""
        ends = [self.size * part // count for part in range(1, count)]
        lengths = np.split(self.completion_lengths, ends)
        places = np.cumsum(self.completion_lengths)[[end - 1 for end in ends]]
        ids = np.split(self.completion_ids, places)
        masks = [None] * count if self.sampling_mask is None else self.sampling_mask.split(places)
        return [
            TokenGroup(self.prompt_ids, part, sizes, self.images, mask)
            for part, sizes, mask in zip(ids, lengths, masks, strict=True)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRewards:
    """Rewards of single steps, for process supervision: completion i has K_i of them.

    rewards: float32 (S,). ends: int64 (S,), the completion-relative index of each step's last token, rising within a
    completion. counts: int64 (G,), sum S.
    """

    rewards: Array
    ends: Array
    counts: Array

    @property
    def unrewarded(self) -> Array:
        """bool (G,): true for completions with a step whose reward is NaN."""
        unknown = np.zeros(len(self.counts), np.bool_)
        unknown[np.repeat(np.arange(len(self.counts)), self.counts)[np.isnan(self.rewards)]] = True
        return unknown


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """One prompt, its G completions and their raw rewards: what is uploaded, scored, leased and trained on.

    policy_version: optimizer steps the sampling weights had. epoch: rises each time the run resumes from a checkpoint.
    rewards: float32 (G,), NaN where a completion could not be judged. finished: bool (G,), true where the completion
    ended by itself and was not cut off. sampler_logps: float32 (C,), log-probs of the sampled tokens at `temperature`
    under the policy that sampled them. loss_mask: bool (C,), false on tokens that must not be trained on.
    policy_versions: int64 (G,), if completions were sampled by different versions; `policy_version` is then the oldest.
    lineage: distinguishes training runs that have the same name; empty for clients without lineages. index: the number
    of the batch's problem, by which steps are ordered. sample: any JSON of the client, as text, for display.

    A scored batch also has these. ref_logps: float32 (C,), log-probs under the reference model, of logits divided by
    the batch's temperature. reference_version: identifies its weights. teacher_logps: float32 (C,), the same by a
    teacher model, if the server has one.

    Raises BatchError if a field is invalid.
    """

    id: str
    run: str
    epoch: int
    policy_version: int
    temperature: float
    group: TokenGroup
    rewards: Array
    finished: Array
    sampler_logps: Array | None = None
    loss_mask: Array | None = None
    policy_versions: Array | None = None
    reward_parts: Mapping[str, Array] = field(default_factory=dict)
    steps: StepRewards | None = None
    top_p: float | None = None
    top_k: int | None = None
    lineage: str = ""
    task: str | None = None
    index: int | None = None
    sample: str | None = None
    ref_logps: Array | None = None
    reference_version: str | None = None
    teacher_logps: Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward_parts", MappingProxyType(dict(self.reward_parts)))
        completions, tokens = self.group.size, len(self.group.completion_ids)
        check_tensor("rewards", self.rewards, np.float32, completions)
        check_tensor("finished", self.finished, np.bool_, completions)
        _check_optional("sampler_logps", self.sampler_logps, np.float32, tokens)
        _check_optional("loss_mask", self.loss_mask, np.bool_, tokens)
        _check_optional("policy_versions", self.policy_versions, np.int64, completions)
        _check_optional("ref_logps", self.ref_logps, np.float32, tokens)
        _check_optional("teacher_logps", self.teacher_logps, np.float32, tokens)
        for name, part in self.reward_parts.items():
            _check_name(f"reward/{name}", name)
            check_tensor(f"reward/{name}", part, np.float32, completions)
        self._check_steps()
        self._check_metadata()
        self._check_values()

    def without_scores(self) -> "Batch":
        """The batch as it was uploaded."""
        return replace(self, ref_logps=None, reference_version=None, teacher_logps=None)

    def _check_steps(self) -> None:
        if self.steps is None:
            return
        check_tensor("step_rewards", self.steps.rewards, np.float32)
        total, counts = len(self.steps.rewards), self.steps.counts
        check_tensor("step_ends", self.steps.ends, np.int64, total)
        check_tensor("step_counts", counts, np.int64, self.group.size)
        if counts.min() < 0 or counts.max() > total or counts.sum() != total:
            raise BatchError("step_counts", f"must be >= 0 and sum to the {total} steps of step_rewards")
        _check_rewards("step_rewards", self.steps.rewards)
        ends = np.split(self.steps.ends, np.cumsum(counts)[:-1])
        for row, length in zip(ends, self.group.completion_lengths, strict=True):
            # Compare neighbours instead of subtracting them: differences of int64 can overflow.
            if len(row) and (row[0] < 0 or row[-1] >= length or (row[1:] <= row[:-1]).any()):
                raise BatchError("step_ends", "must rise within each completion and stay below its length")

    def _check_values(self) -> None:
        parts = {f"reward/{name}": part for name, part in self.reward_parts.items()}
        for name, values in {"rewards": self.rewards, **parts}.items():
            _check_rewards(name, values)
        for name in ("sampler_logps", "ref_logps", "teacher_logps"):
            if (logps := getattr(self, name)) is not None:
                check_logps(name, logps)
        if self.policy_versions is not None and self.policy_versions.min() != self.policy_version:
            raise BatchError("policy_versions", f"must have policy_version ({self.policy_version}) as their oldest")

    def _check_metadata(self) -> None:
        _check_id(self.id)
        _check_name("run", self.run)
        if self.lineage and not re.fullmatch(LINEAGE, self.lineage, re.ASCII):
            raise BatchError("lineage", f"must match {LINEAGE}, got {self.lineage[:40]!r}")
        if self.task is not None:
            _check_name("task", self.task)
        for name in ("epoch", "policy_version"):
            if not 0 <= getattr(self, name) < 2**63:
                raise BatchError(name, f"must be an integer in [0, 2^63), got {getattr(self, name)}")
        if self.index is not None and not 0 <= self.index <= MAX_INDEX:
            raise BatchError("index", f"must be an integer in [0, {MAX_INDEX}], got {self.index}")
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise BatchError(
                "temperature", f"must lie in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}], got {self.temperature}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BatchError("top_p", f"must lie in (0, 1], got {self.top_p}")
        if self.top_k is not None and not 0 <= self.top_k < 2**63:
            raise BatchError("top_k", f"must be an integer >= 0, got {self.top_k}")
        if self.sample is not None:
            _check_sample(self.sample)
        if self.reference_version is not None:
            _check_name("reference_version", self.reference_version)
        if (self.ref_logps is None) != (self.reference_version is None):
            raise BatchError("reference_version", "must come with ref_logps, and only with them")
        if self.teacher_logps is not None and self.ref_logps is None:
            raise BatchError("teacher_logps", "must come with ref_logps only")


@dataclass(frozen=True, eq=False)
class Training:
    """What a training step computed for one batch. The server stores it with the batch, for display.

    step: training steps done, this one included. advantages: float32 (C,), 0 on tokens that did not train. logps:
    float32 (C,), of the policy after that step, at the batch's temperature. Raises BatchError if a field is invalid.
    """

    step: int
    advantages: Array
    logps: Array

    def __post_init__(self) -> None:
        if not 0 <= self.step < 2**63:
            raise BatchError("step", f"must be an integer in [0, 2^63), got {self.step}")
        check_tensor("advantages", self.advantages, np.float32)
        check_tensor("logps", self.logps, np.float32, len(self.advantages))
        if not len(self.logps):
            raise BatchError("logps", "must not be empty")
        if not np.isfinite(self.advantages).all():
            raise BatchError("advantages", "must be finite")
        check_logps("logps", self.logps)

    def check_fits(self, completion_tokens: int) -> None:
        """Raises BatchError unless it belongs to a batch with this many completion tokens."""
        check_tensor("advantages", self.advantages, np.float32, completion_tokens)


def check_tensor(name: str, value: Array, dtype: type[np.generic], length: int | None = None) -> None:
    if value.dtype != dtype:
        raise BatchError(name, f"must be {np.dtype(dtype).name}, got {value.dtype.name}")
    if value.ndim != 1 or (length is not None and len(value) != length):
        raise BatchError(name, f"must have shape ({'*' if length is None else length},), got {value.shape}")


def _check_sampling_mask(mask: SamplingMask, completion_ids: Array) -> None:
    check_tensor("sampling_mask_ids", mask.token_ids, np.int32)
    check_tensor("sampling_mask_counts", mask.counts, np.int64, len(completion_ids))
    total = len(mask.token_ids)
    # Check each count before the sum, which could overflow otherwise.
    if mask.counts.min() < 0 or mask.counts.max() > total or mask.counts.sum() != total:
        raise BatchError("sampling_mask_counts", f"must be >= 0 and sum to the {total} ids of sampling_mask_ids")
    if not mask.keeps(completion_ids):
        raise BatchError("sampling_mask_ids", "must hold the completion's token wherever they hold any")


def _check_images(images: Mapping[str, Array]) -> None:
    if len(images) > MAX_IMAGE_TENSORS:
        raise BatchError("image", f"must be at most {MAX_IMAGE_TENSORS} tensors, got {len(images)}")
    for key, tensor in images.items():
        name = f"image/{key}"
        if not re.fullmatch("[a-z][a-z0-9_]{0,39}", key, re.ASCII):
            raise BatchError(name[:80], "must be named in lower-case letters, digits and underscores")
        if tensor.dtype not in _IMAGE_DTYPES:
            raise BatchError(name, f"must be float32, uint8 or int64, got {tensor.dtype.name}")
        if not 1 <= tensor.ndim <= MAX_IMAGE_DIMENSIONS or not tensor.size:
            raise BatchError(
                name, f"must have 1 to {MAX_IMAGE_DIMENSIONS} dimensions, none of them 0, got {tensor.shape}"
            )
        if tensor.dtype == np.float32 and not np.isfinite(tensor).all():
            raise BatchError(name, "must be finite")


def _check_optional(name: str, value: Array | None, dtype: type[np.generic], length: int) -> None:
    if value is not None:
        check_tensor(name, value, dtype, length)


def _check_rewards(name: str, values: Array) -> None:
    if (np.abs(values) > MAX_REWARD).any():  # false for NaN
        raise BatchError(name, f"must lie in [-{MAX_REWARD:g}, {MAX_REWARD:g}] (NaN means: could not be judged)")


def check_logps(name: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise BatchError(name, "must be finite")
    if values.max() > MAX_LOGP:
        raise BatchError(name, f"must be at most 0, as log-probs are, got {values.max():g}")


def _check_name(field: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_NAME_CHARACTERS or not value.isprintable():
        raise BatchError(field, f"must be 1 to {MAX_NAME_CHARACTERS} printable characters, got {value[:40]!r}")


def _check_sample(text: str) -> None:
    try:
        size = len(text.encode())
        value = json.loads(text)
    except (ValueError, RecursionError):  # lone surrogates are ValueErrors too
        raise BatchError("sample", "must be JSON") from None
    try:
        to_json(value)
    except ValueError:
        reason = "must not contain lone surrogates, which UTF-8 cannot encode, nor nest deeper than about 200 levels"
        raise BatchError("sample", reason) from None
    if size > MAX_SAMPLE_BYTES:
        raise BatchError("sample", f"must be at most {MAX_SAMPLE_BYTES} bytes of JSON, got {size}")


def _check_id(value: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value) or UUID(value).version is None:
        raise BatchError("id", f"must be a lower-case UUID, preferably of version 7; got {value[:40]!r}")
