"""An upload of a Simple-GRPO generator, as it arrives and as the queue stores it.

It arrives as a frame: `{"plen": p}`, padded rows, rewards, optionally the sampler's log-probs. It is stored as
safetensors, so that no pickle is on the disk: `format` is `legacy-batch/1`; the metadata's `base` is the JSON as it was
uploaded; the tensors `inputs`, `rewards` and, if present, `gen_logps` keep their dtypes. Its scores lie next to it,
as those of every batch: `ref_logps` are the log-probs of the rows, one after the other.
"""

import json
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ref_server.legacy.tensors import (
    FLOATS,
    INTEGERS,
    MalformedUpload,
    join_frame,
    read_tensor,
    split_frame,
    write_tensor,
)
from ref_server.scoring import jobs
from ref_server.scoring.jobs import Groups
from shared import wire
from shared.api import LEGACY_RUN
from shared.batch import MAX_LOGP, MAX_REWARD, BatchError, TokenGroup

MAX_JSON_BYTES = 16 * 1024
# A generator in string mode sends a question with its answers as text, and their rewards.
_STRING_MODE_PARTS = 2


@dataclass(frozen=True, eq=False)
class LegacyUpload:
    """B rows, padded to L tokens each.

    base: the JSON object as it was uploaded, with the prompt's length. plen: p, in [1, L). inputs: int64 (B, L).
    rewards: (B,) of any float dtype. gen_logps: (B, L-p) of any float dtype. Raises MalformedUpload for other shapes,
    and for values that would break the trainer's step: those clients do not look at what they get.
    """

    base: str
    plen: int
    inputs: Tensor
    rewards: Tensor
    gen_logps: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dim() != 2:
            raise MalformedUpload(f"inputs must have shape (B, L), got {_shape(self.inputs)}")
        rows, length = self.inputs.shape
        if not 1 <= self.plen < length:
            raise MalformedUpload(f"plen must lie in [1, {length}), the length of a row, got {self.plen}")
        if self.rewards.shape != (rows,):
            raise MalformedUpload(f"rewards must have shape ({rows},), got {_shape(self.rewards)}")
        scored = (rows, length - self.plen)
        if self.gen_logps is not None and self.gen_logps.shape != scored:
            raise MalformedUpload(f"gen_logps must have shape {scored}, got {_shape(self.gen_logps)}")
        if (self.rewards.double().abs() > MAX_REWARD).any():  # false for NaN
            raise MalformedUpload(f"rewards must lie in [-{MAX_REWARD:g}, {MAX_REWARD:g}]")
        if self.gen_logps is not None and not _are_logps(self.gen_logps):
            raise MalformedUpload("gen_logps must be finite and at most 0, as log-probs are")

    @property
    def shares_prompt(self) -> bool:
        """Whether all rows begin with the same prompt; it is then computed once."""
        prompts = self.inputs[:, : self.plen]
        return bool((prompts == prompts[0]).all())

    @property
    def tokens(self) -> int:
        """Tokens that are computed: the sum over `groups`, without building them."""
        rows, length = self.inputs.shape
        return self.plen + rows * (length - self.plen) if self.shares_prompt else rows * length

    def groups(self) -> list[TokenGroup]:
        """One group when all rows share the prompt, else one for each row. Completions include the pads."""
        rows = self.inputs.numpy()
        prompts, completions = rows[:, : self.plen], rows[:, self.plen :]
        if self.shares_prompt:
            return [_group(prompts[0], completions)]
        return [_group(prompt, completion[None]) for prompt, completion in zip(prompts, completions, strict=True)]


def read_upload(body: bytes) -> LegacyUpload | None:
    """Checks and reads the body of an upload; None in string mode, which is not kept. Raises MalformedUpload.

    Allocates no more than a few times the body's size.
    """
    parts = split_frame(body)
    if len(parts) == _STRING_MODE_PARTS:
        return None
    if len(parts) not in (3, 4):
        raise MalformedUpload(f"an upload has 3 parts, or 4 with gen_logps, got {len(parts)}")
    base, plen = _read_base(bytes(parts[0]))
    return LegacyUpload(
        base,
        plen,
        inputs=read_tensor("inputs", parts[1], INTEGERS),
        rewards=read_tensor("rewards", parts[2], FLOATS),
        gen_logps=read_tensor("gen_logps", parts[3], FLOATS) if len(parts) == 4 else None,
    )


def _read_base(part: bytes) -> tuple[str, int]:
    """The JSON text, and its plen."""
    if len(part) > MAX_JSON_BYTES:
        raise MalformedUpload(f"the JSON must have at most {MAX_JSON_BYTES} bytes, got {len(part)}")
    try:
        text = part.decode()
        base = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedUpload(f"part 0 must be a JSON object in UTF-8: {error}") from None
    plen = base.get("plen") if isinstance(base, dict) else None
    if not isinstance(plen, int) or isinstance(plen, bool):
        raise MalformedUpload('part 0 must be a JSON object with an integer "plen"')
    return text, plen


def _group(prompt: np.ndarray, completions: np.ndarray) -> TokenGroup:
    rows, length = completions.shape
    return TokenGroup(np.ascontiguousarray(prompt), completions.reshape(-1), np.full(rows, length))


def _are_logps(values: Tensor) -> bool:
    return bool(values.isfinite().all()) and values.max().item() <= MAX_LOGP


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


FORMAT = "legacy-batch/1"


def register_reader() -> None:
    """Lets the scoring loop read these bodies, which may wait in the store whether or not the protocol is served."""
    jobs.register_reader(LEGACY_RUN, read_payload)


def write_payload(upload: LegacyUpload) -> bytes:
    """The body of an upload, as the queue stores it."""
    tensors = {"inputs": upload.inputs, "rewards": upload.rewards}
    if upload.gen_logps is not None:
        tensors["gen_logps"] = upload.gen_logps
    return safetensors.torch.save(tensors, {"format": FORMAT, "base": upload.base})


def read_payload(body: bytes) -> Groups:
    """What is to be scored of a body that `write_payload` made: at temperature 1, since the frame has none.

    Raises BatchError when the body is damaged.
    """
    upload = read_stored_upload(body)
    groups = upload.groups()
    return groups, [1.0] * len(groups)


def read_stored_upload(body: bytes) -> LegacyUpload:
    """The upload that `write_payload` stored. Raises BatchError when the body is damaged."""
    base, tensors = _load(body)
    return LegacyUpload(base, json.loads(base)["plen"], tensors["inputs"], tensors["rewards"], tensors.get("gen_logps"))


def scored_frame(body: bytes, scores: bytes) -> bytes:
    """A scored body as the frame for the protocol's trainers: JSON, inputs, rewards, refs, and gen_logps if present.

    Raises BatchError when the body or its scores are damaged.
    """
    upload = read_stored_upload(body)
    rows, length = upload.inputs.shape
    refs = torch.tensor(wire.parse(scores)[1]["ref_logps"]).reshape(rows, length - upload.plen)
    tensors = [upload.inputs, upload.rewards, refs, *([] if upload.gen_logps is None else [upload.gen_logps])]
    return join_frame([upload.base.encode(), *map(write_tensor, tensors)])


def _load(body: bytes) -> tuple[str, dict[str, Tensor]]:
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        return header["__metadata__"]["base"], safetensors.torch.load(body)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise BatchError("body", f"must be a safetensors file of format {FORMAT!r}: {error}") from None
