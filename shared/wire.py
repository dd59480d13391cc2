"""Batches and their training data as safetensors bytes: the bodies of uploads and leases.

A body is a plain safetensors file: any safetensors library reads it, and it cannot execute code. An upload of several
batches repeats, to its end: a u32 big-endian length, and a batch of that length. An answer with several leases repeats
a u32 big-endian length, a lease as JSON of that length, and the bytes of its batch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import safetensors.numpy

from shared import tensor_file
from shared.api import Lease
from shared.batch import LINEAGE, Array, Batch, BatchError, StepRewards, TokenGroup, Training, check_logps
from shared.sampling_mask import SamplingMask
from shared.tensor_file import MAX_HEADER_BYTES, Layout, number, read_header, required

CONTENT_TYPE = "application/vnd.safetensors"
LEASES_CONTENT_TYPE = "application/vnd.tandem.batches"
UPLOADS_CONTENT_TYPE = "application/vnd.tandem.uploads"
ROLLOUT_FORMAT = "rollout-batch/1"
SCORED_FORMAT = "scored-batch/1"
# The same two formats with tensors of the prompt's images.
IMAGE_ROLLOUT_FORMAT = "rollout-batch/2"
IMAGE_SCORED_FORMAT = "scored-batch/2"
TRAINING_FORMAT = "training/1"
# Scoring adds a tensor or two and a version to an admitted header, and may format its numbers differently.
_MAX_SCORED_HEADER_BYTES = MAX_HEADER_BYTES + 1024

_TENSORS = {
    "prompt_ids": "I64",
    "teacher_prompt_ids": "I64",
    "completion_ids": "I64",
    "completion_lengths": "I64",
    "rewards": "F32",
    "finished": "BOOL",
    "sampler_logps": "F32",
    "loss_mask": "BOOL",
    "sampling_mask_ids": "I32",
    "sampling_mask_counts": "I64",
    "policy_versions": "I64",
    "step_rewards": "F32",
    "step_ends": "I64",
    "step_counts": "I64",
    "ref_logps": "F32",
    "teacher_logps": "F32",
}
_MASK_TENSORS = ("sampling_mask_ids", "sampling_mask_counts")
_STEP_TENSORS = ("step_rewards", "step_ends", "step_counts")
_REWARD_PREFIX = "reward/"
_IMAGE_PREFIX = "image/"
_ROLLOUT_FORMATS = (ROLLOUT_FORMAT, IMAGE_ROLLOUT_FORMAT)
_SCORED_FORMATS = (SCORED_FORMAT, IMAGE_SCORED_FORMAT)
_METADATA = {
    "format", "id", "run", "epoch", "policy_version", "temperature",
    "top_p", "top_k", "lineage", "task", "index", "sample", "reference_version",
}  # fmt: skip
_SCORED_HEADER_BYTES: dict[str, int] = dict.fromkeys(_SCORED_FORMATS, _MAX_SCORED_HEADER_BYTES)
_LAYOUT = Layout("batch", _TENSORS, _METADATA, _REWARD_PREFIX, _IMAGE_PREFIX, _SCORED_HEADER_BYTES)
_TRAINING_LAYOUT = Layout("training", {"advantages": "F32", "logps": "F32"}, {"format", "step"})

# The longest JSON of a lease: ids and tokens are short.
MAX_LEASE_HEADER_BYTES = 4096
LENGTH_BYTES = 4
# Metadata and tensors of a safetensors file.
_Parts = tuple[dict[str, str], dict[str, Array]]


def encode(batch: Batch) -> bytes:
    """The batch as a safetensors file. Raises BatchError when its header exceeds the limit."""
    tensors: dict[str, Array | None] = {
        "prompt_ids": batch.group.prompt_ids,
        "teacher_prompt_ids": batch.group.teacher_prompt_ids,
        "completion_ids": batch.group.completion_ids,
        "completion_lengths": batch.group.completion_lengths,
        "rewards": batch.rewards,
        "finished": batch.finished,
        "sampler_logps": batch.sampler_logps,
        "loss_mask": batch.loss_mask,
        "policy_versions": batch.policy_versions,
        "ref_logps": batch.ref_logps,
        "teacher_logps": batch.teacher_logps,
        **{_REWARD_PREFIX + name: part for name, part in batch.reward_parts.items()},
        **{_IMAGE_PREFIX + name: tensor for name, tensor in batch.group.images.items()},
    }
    if (mask := batch.group.sampling_mask) is not None:
        tensors |= {"sampling_mask_ids": mask.token_ids, "sampling_mask_counts": mask.counts}
    if batch.steps is not None:
        tensors |= {
            "step_rewards": batch.steps.rewards,
            "step_ends": batch.steps.ends,
            "step_counts": batch.steps.counts,
        }
    metadata: dict[str, Any] = {
        "format": (_ROLLOUT_FORMATS if batch.ref_logps is None else _SCORED_FORMATS)[bool(batch.group.images)],
        "id": batch.id,
        "run": batch.run,
        "epoch": batch.epoch,
        "policy_version": batch.policy_version,
        "temperature": batch.temperature,
        "top_p": batch.top_p,
        "top_k": batch.top_k,
        "lineage": batch.lineage or None,
        "task": batch.task,
        "index": batch.index,
        "sample": batch.sample,
        "reference_version": batch.reference_version,
    }
    body = safetensors.numpy.save(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None},
        {name: str(value) for name, value in metadata.items() if value is not None},
    )
    _LAYOUT.check_header_size(int.from_bytes(body[:8], "little"), metadata["format"])  # many reward parts can exceed it
    return body


def encode_scores(
    ref_logps: Array, reference_version: str, teacher_logps: Array | None = None, *, images: bool = False
) -> bytes:
    """What scoring adds to a batch, as a safetensors file for `with_scores`. images: whether the batch has some.

    Raises BatchError for log-probs that are not finite.
    """
    tensors = {"ref_logps": ref_logps} | ({} if teacher_logps is None else {"teacher_logps": teacher_logps})
    for name, logps in tensors.items():
        check_logps(name, logps)
    return safetensors.numpy.save(tensors, {"format": _SCORED_FORMATS[images], "reference_version": reference_version})


def with_scores(body: bytes, scores: bytes | None) -> bytes:
    """An uploaded batch and its scores, as one scored batch. Without scores it returns the batch as it is."""
    return body if scores is None else tensor_file.splice(body, scores)


def decode(body: bytes) -> Batch:
    """Untrusted bytes -> a checked batch. Raises BatchError naming the first invalid field."""
    return to_batch(*parse(body))


def content_hash(body: bytes) -> bytes:
    """The content hash of a body. Raises BatchError when it cannot be parsed."""
    return hash_content(*parse(body))


def parse(body: bytes) -> _Parts:
    """Untrusted bytes -> metadata and tensors. Header, names and dtypes are checked; `to_batch` checks the values.

    Raises BatchError.
    """
    return tensor_file.parse(body, _LAYOUT)


def hash_content(metadata: dict[str, str], tensors: dict[str, Array]) -> bytes:
    """32 bytes: SHA-256 of the sorted metadata, then of each tensor's name, dtype, shape and bytes, sorted by name.

    The body itself is not hashed: files of equal content may differ in bytes, since metadata has no fixed order.
    """
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        digest.update(tensor.tobytes())
    return digest.digest()


def run_of(body: bytes) -> str | None:
    """The run in the header of untrusted bytes, None if there is none. Only the header is read."""
    try:
        return read_header(body, _LAYOUT)[0].get("run")
    except BatchError:
        return None


def to_batch(metadata: dict[str, str], tensors: dict[str, Array]) -> Batch:
    """The checked batch. Raises BatchError naming the first invalid field."""
    scored = _choose_format(metadata, tensors)
    return Batch(
        id=required(metadata, "id"),
        run=required(metadata, "run"),
        epoch=number(metadata, "epoch", int),
        policy_version=number(metadata, "policy_version", int),
        temperature=number(metadata, "temperature", float),
        group=TokenGroup(
            required(tensors, "prompt_ids"),
            required(tensors, "completion_ids"),
            required(tensors, "completion_lengths"),
            _by_suffix(tensors, _IMAGE_PREFIX),
            _sampling_mask(tensors),
            tensors.get("teacher_prompt_ids"),
        ),
        rewards=required(tensors, "rewards"),
        finished=required(tensors, "finished"),
        sampler_logps=tensors.get("sampler_logps"),
        loss_mask=tensors.get("loss_mask"),
        policy_versions=tensors.get("policy_versions"),
        reward_parts=_by_suffix(tensors, _REWARD_PREFIX),
        steps=_steps(tensors),
        top_p=number(metadata, "top_p", float) if "top_p" in metadata else None,
        top_k=number(metadata, "top_k", int) if "top_k" in metadata else None,
        lineage=_lineage(metadata),
        task=metadata.get("task"),
        index=number(metadata, "index", int) if "index" in metadata else None,
        sample=metadata.get("sample"),
        ref_logps=required(tensors, "ref_logps") if scored else None,
        reference_version=required(metadata, "reference_version") if scored else None,
        teacher_logps=tensors.get("teacher_logps"),
    )


def _choose_format(metadata: dict[str, str], tensors: dict[str, Array]) -> bool:
    """True for a scored batch, False for a rollout batch."""
    name = required(metadata, "format")
    scored = name in _SCORED_FORMATS
    if not scored and name not in _ROLLOUT_FORMATS:
        raise BatchError("format", f"must be {ROLLOUT_FORMAT!r} or {SCORED_FORMAT!r}, got {name[:40]!r}")
    has_images = any(tensor.startswith(_IMAGE_PREFIX) for tensor in tensors)
    if has_images != (name in (IMAGE_ROLLOUT_FORMAT, IMAGE_SCORED_FORMAT)):
        fitting = (_SCORED_FORMATS if scored else _ROLLOUT_FORMATS)[has_images]
        raise BatchError("format", f"must be {fitting!r} {'with' if has_images else 'without'} images, got {name!r}")
    if not scored:
        for key in ("ref_logps", "teacher_logps", "reference_version"):
            if key in tensors or key in metadata:
                raise BatchError(key, f"belongs to a batch of format {SCORED_FORMAT!r} only")
    return scored


def _by_suffix(tensors: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The tensors whose names begin with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _sampling_mask(tensors: dict[str, Array]) -> SamplingMask | None:
    if not any(name in tensors for name in _MASK_TENSORS):
        return None
    return SamplingMask(*(required(tensors, name) for name in _MASK_TENSORS))


def _steps(tensors: dict[str, Array]) -> StepRewards | None:
    if not any(name in tensors for name in _STEP_TENSORS):
        return None
    return StepRewards(
        rewards=required(tensors, "step_rewards"),
        ends=required(tensors, "step_ends"),
        counts=required(tensors, "step_counts"),
    )


def _lineage(metadata: dict[str, str]) -> str:
    """The lineage of a batch; empty if the metadata have none. Raises BatchError for an empty string in them."""
    if metadata.get("lineage") == "":
        raise BatchError("lineage", f"must match {LINEAGE}, got ''")
    return metadata.get("lineage", "")


def encode_uploads(batches: Iterable[bytes]) -> bytes:
    return b"".join(len(batch).to_bytes(LENGTH_BYTES, "big") + batch for batch in batches)


def decode_uploads(body: bytes) -> Iterator[bytes]:
    """Untrusted bytes -> each batch, still encoded. Raises ValueError if lengths do not match."""
    place = 0
    while place < len(body):
        length = int.from_bytes(_cut(body, place, LENGTH_BYTES, "a length"), "big")
        place += LENGTH_BYTES
        yield _cut(body, place, length, "a batch")
        place += length


def encode_leases(batches: Iterable[tuple[Lease, bytes]]) -> list[bytes]:
    """The body in pieces, two for each batch: batches are not copied."""
    pieces: list[bytes] = []
    for lease, batch in batches:
        header = lease.model_copy(update={"bytes": len(batch)}).model_dump_json().encode()
        pieces += [len(header).to_bytes(LENGTH_BYTES, "big") + header, batch]
    return pieces


def decode_leases(body: bytes) -> Iterator[tuple[Lease, bytes]]:
    """Untrusted bytes -> each lease with its batch, still encoded. Raises ValueError if lengths do not match."""
    place = 0
    while place < len(body):
        length = int.from_bytes(_cut(body, place, LENGTH_BYTES, "a length"), "big")
        if length > MAX_LEASE_HEADER_BYTES:
            raise ValueError(f"a header must be at most {MAX_LEASE_HEADER_BYTES} bytes, got {length}")
        place += LENGTH_BYTES
        lease = Lease.model_validate_json(_cut(body, place, length, "a header"))
        place += length
        yield lease, _cut(body, place, lease.bytes, f"batch {lease.id[:80]!r}")
        place += lease.bytes


def _cut(body: bytes, place: int, length: int, what: str) -> bytes:
    if length > len(body) - place:
        raise ValueError(f"{what} of {length} bytes is claimed at byte {place}, and the body has {len(body)}")
    return body[place : place + length]


def encode_training(training: Training) -> bytes:
    """Training data of a batch, as a safetensors file."""
    tensors = {name: np.ascontiguousarray(getattr(training, name)) for name in _TRAINING_LAYOUT.dtypes}
    return safetensors.numpy.save(tensors, {"format": TRAINING_FORMAT, "step": str(training.step)})


def decode_training(body: bytes) -> Training:
    """Untrusted bytes -> checked training data. Raises BatchError naming the first invalid field."""
    metadata, tensors = tensor_file.parse(body, _TRAINING_LAYOUT)
    if required(metadata, "format") != TRAINING_FORMAT:
        raise BatchError("format", f"must be {TRAINING_FORMAT!r}, got {metadata['format'][:40]!r}")
    return Training(number(metadata, "step", int), required(tensors, "advantages"), required(tensors, "logps"))
