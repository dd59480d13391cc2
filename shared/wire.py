"""Batches as safetensors bytes: the body of every upload and of every lease.

A body is a plain safetensors file: any safetensors library reads it, and it cannot execute code. The header is checked
before anything else is read. Lengths in the header are checked against the body before memory is allocated.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from shared.batch import LINEAGE, Array, BatchError, RolloutBatch, ScoredBatch, StepRewards, TokenGroup

CONTENT_TYPE = "application/vnd.safetensors"
ROLLOUT_FORMAT = "rollout-batch/1"
SCORED_FORMAT = "scored-batch/1"
MAX_HEADER_BYTES = 64 * 1024
# Scoring adds a tensor or two and a version to an admitted header, and may format its numbers differently.
_MAX_SCORED_HEADER_BYTES = MAX_HEADER_BYTES + 1024

_DTYPES: dict[str, type[np.generic]] = {"I64": np.int64, "F32": np.float32, "BOOL": np.bool_}
_TENSORS = {
    "prompt_ids": "I64",
    "completion_ids": "I64",
    "completion_lengths": "I64",
    "rewards": "F32",
    "finished": "BOOL",
    "sampler_logps": "F32",
    "loss_mask": "BOOL",
    "policy_versions": "I64",
    "step_rewards": "F32",
    "step_ends": "I64",
    "step_counts": "I64",
    "ref_logps": "F32",
    "teacher_logps": "F32",
}
_STEP_TENSORS = ("step_rewards", "step_ends", "step_counts")
_REWARD_PREFIX = "reward/"
_METADATA = {
    "format", "id", "run", "epoch", "policy_version", "temperature",
    "top_p", "top_k", "lineage", "task", "sample", "reference_version",
}  # fmt: skip


def encode(batch: RolloutBatch | ScoredBatch) -> bytes:
    """The batch as a safetensors file. Raises BatchError when its header exceeds the limit."""
    rollout = batch.rollout if isinstance(batch, ScoredBatch) else batch
    tensors: dict[str, Array | None] = {
        "prompt_ids": rollout.group.prompt_ids,
        "completion_ids": rollout.group.completion_ids,
        "completion_lengths": rollout.group.completion_lengths,
        "rewards": rollout.rewards,
        "finished": rollout.finished,
        "sampler_logps": rollout.sampler_logps,
        "loss_mask": rollout.loss_mask,
        "policy_versions": rollout.policy_versions,
        **{_REWARD_PREFIX + name: part for name, part in rollout.reward_parts.items()},
    }
    if rollout.steps is not None:
        tensors |= {
            "step_rewards": rollout.steps.rewards,
            "step_ends": rollout.steps.ends,
            "step_counts": rollout.steps.counts,
        }
    metadata: dict[str, Any] = {
        "format": ROLLOUT_FORMAT,
        "id": rollout.id,
        "run": rollout.run,
        "epoch": rollout.epoch,
        "policy_version": rollout.policy_version,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "lineage": rollout.lineage or None,
        "task": rollout.task,
        "sample": rollout.sample,
    }
    if isinstance(batch, ScoredBatch):
        tensors |= {"ref_logps": batch.ref_logps, "teacher_logps": batch.teacher_logps}
        metadata |= {"format": SCORED_FORMAT, "reference_version": batch.reference_version}
    body = safetensors.numpy.save(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None},
        {name: str(value) for name, value in metadata.items() if value is not None},
    )
    _check_header_size(int.from_bytes(body[:8], "little"), metadata["format"])  # many reward parts can exceed it
    return body


@dataclass(frozen=True, eq=False)
class Parsed:
    """A safetensors file. Header, names, dtypes are checked; values are checked by `batch`."""

    metadata: dict[str, str]
    tensors: dict[str, Array]

    def batch(self) -> RolloutBatch | ScoredBatch:
        """The checked batch. Raises BatchError naming the first invalid field."""
        return _batch(self.metadata, self.tensors)

    def content_hash(self) -> bytes:
        """32 bytes: SHA-256 of the sorted metadata, then of each tensor's name, dtype, shape and bytes, sorted by name.

        The body itself is not hashed: files of equal content may differ in bytes, since metadata has no fixed order.
        """
        digest = hashlib.sha256(json.dumps(self.metadata, sort_keys=True).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
            digest.update(tensor.tobytes())
        return digest.digest()


def decode(body: bytes) -> RolloutBatch | ScoredBatch:
    """Untrusted bytes -> a checked batch. Raises BatchError naming the first invalid field."""
    return parse(body).batch()


def content_hash(body: bytes) -> bytes:
    """The content hash of a body. Raises BatchError when it cannot be parsed."""
    return parse(body).content_hash()


def parse(body: bytes) -> Parsed:
    """Untrusted bytes -> metadata and tensors. Raises BatchError."""
    metadata, names = _read_header(body)
    for name in names:
        if name not in _TENSORS and not name.startswith(_REWARD_PREFIX):
            raise BatchError(name[:80], "is not a tensor of a batch")
    try:
        parts = safetensors.deserialize(body)
    except safetensors.SafetensorError as error:
        raise BatchError("body", f"must be a safetensors file: {error}") from None
    tensors: dict[str, Array] = {}
    for name, part in parts:
        expected = _TENSORS.get(name, "F32")
        if part["dtype"] != expected:
            raise BatchError(name, f"must have dtype {expected}, got {part['dtype']}")
        if len(part["shape"]) != 1:
            raise BatchError(name, f"must have one dimension, got shape {part['shape'][:8]}")
        data = bytes(part["data"])
        if expected == "BOOL" and data.strip(b"\0\1"):
            raise BatchError(name, "must hold the bytes 0 and 1 only")
        tensors[name] = np.frombuffer(data, dtype=_DTYPES[expected])
    return Parsed(metadata, tensors)


def run_of(body: bytes) -> str | None:
    """The run that untrusted bytes name in their header, which alone is read; None if there is none."""
    try:
        return _read_header(body)[0].get("run")
    except BatchError:
        return None


def _batch(metadata: dict[str, str], tensors: dict[str, Array]) -> RolloutBatch | ScoredBatch:
    scored = _choose_format(metadata, tensors)
    rollout = RolloutBatch(
        id=_required(metadata, "id"),
        run=_required(metadata, "run"),
        epoch=_number(metadata, "epoch", int),
        policy_version=_number(metadata, "policy_version", int),
        temperature=_number(metadata, "temperature", float),
        group=TokenGroup(
            _required(tensors, "prompt_ids"),
            _required(tensors, "completion_ids"),
            _required(tensors, "completion_lengths"),
        ),
        rewards=_required(tensors, "rewards"),
        finished=_required(tensors, "finished"),
        sampler_logps=tensors.get("sampler_logps"),
        loss_mask=tensors.get("loss_mask"),
        policy_versions=tensors.get("policy_versions"),
        reward_parts={
            name.removeprefix(_REWARD_PREFIX): part for name, part in tensors.items() if name.startswith(_REWARD_PREFIX)
        },
        steps=_steps(tensors),
        top_p=_number(metadata, "top_p", float) if "top_p" in metadata else None,
        top_k=_number(metadata, "top_k", int) if "top_k" in metadata else None,
        lineage=_lineage(metadata),
        task=metadata.get("task"),
        sample=metadata.get("sample"),
    )
    if not scored:
        return rollout
    return ScoredBatch(
        rollout,
        _required(tensors, "ref_logps"),
        _required(metadata, "reference_version"),
        tensors.get("teacher_logps"),
    )


def _read_header(body: bytes) -> tuple[dict[str, str], list[str]]:
    """Metadata and tensor names from the JSON header. Checks the header's claimed length first."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > len(body) - 8:
        raise BatchError("body", f"must be a safetensors file; its {len(body)} bytes do not hold the header they claim")
    _check_header_size(size, SCORED_FORMAT)  # the larger of the two limits, before parsing
    try:
        header = json.loads(body[8 : 8 + size], object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise BatchError("header", f"must be a JSON object with unique keys: {error}") from None
    if not isinstance(header, dict):
        raise BatchError("header", "must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BatchError("__metadata__", "must map strings to strings")
    for name in metadata:
        if name not in _METADATA:
            raise BatchError(name[:80], "is not a metadata key of a batch")
    _check_header_size(size, metadata.get("format"))
    return metadata, list(header)


def _check_header_size(size: int, format: str | None) -> None:
    most = _MAX_SCORED_HEADER_BYTES if format == SCORED_FORMAT else MAX_HEADER_BYTES
    if size > most:
        raise BatchError("header", f"must be at most {most} bytes, got {size}")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    for key in mapping:
        key.encode()  # raises ValueError for a lone surrogate: an error could not name such a key in UTF-8
    return mapping


def _choose_format(metadata: dict[str, str], tensors: dict[str, Array]) -> bool:
    """True for a scored batch, False for a rollout batch."""
    name = _required(metadata, "format")
    if name not in (ROLLOUT_FORMAT, SCORED_FORMAT):
        raise BatchError("format", f"must be {ROLLOUT_FORMAT!r} or {SCORED_FORMAT!r}, got {name[:40]!r}")
    if name == ROLLOUT_FORMAT:
        for key in ("ref_logps", "teacher_logps", "reference_version"):
            if key in tensors or key in metadata:
                raise BatchError(key, f"belongs to a batch of format {SCORED_FORMAT!r} only")
    return name == SCORED_FORMAT


def _steps(tensors: dict[str, Array]) -> StepRewards | None:
    if not any(name in tensors for name in _STEP_TENSORS):
        return None
    return StepRewards(
        rewards=_required(tensors, "step_rewards"),
        ends=_required(tensors, "step_ends"),
        counts=_required(tensors, "step_counts"),
    )


def _lineage(metadata: dict[str, str]) -> str:
    """Empty where the metadata have none. An empty one in them is refused: none is told in one way."""
    if metadata.get("lineage") == "":
        raise BatchError("lineage", f"must match {LINEAGE}, got ''")
    return metadata.get("lineage", "")


def _required(mapping: dict[str, Any], name: str) -> Any:
    if name not in mapping:
        raise BatchError(name, "is missing")
    return mapping[name]


def _number(metadata: dict[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    """Parses a decimal number. Refuses `1_0`, ` 1 ` and non-ASCII digits, which Python's own parsers accept."""
    text = _required(metadata, name)
    pattern = r"-?[0-9]{1,19}" if kind is int else r"-?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?"
    if not re.fullmatch(pattern, text, re.ASCII):
        raise BatchError(name, f"must be a decimal {'integer' if kind is int else 'number'}, got {text[:40]!r}")
    return kind(text)
