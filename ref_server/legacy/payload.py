"""Simple-GRPO's batches as the queue stores them: as safetensors, so that no pickle is on the disk.

`format` `legacy-batch/1`; the metadata's `base` is the JSON as it was uploaded; the tensors `inputs`, `rewards` and,
if present, `gen_logps` keep their dtypes. Scoring adds `refs`, float32 (B, L-p), and the metadata's
`reference_version`.
"""

import json
from functools import partial

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ref_server.legacy.frame import join_frame
from ref_server.legacy.tensors import write_tensor
from ref_server.legacy.upload import LegacyUpload
from ref_server.scoring import jobs
from ref_server.scoring.jobs import Payload
from ref_server.scoring.reference import Scores
from shared.api import LEGACY_RUN
from shared.batch import BatchError

FORMAT = "legacy-batch/1"


def register_reader() -> None:
    """Lets the scoring loop read these bodies, which may wait in the store whether or not the protocol is served."""
    jobs.register_reader(LEGACY_RUN, read_payload)


def write_payload(upload: LegacyUpload) -> bytes:
    """The body of an upload before it is scored."""
    return _save(upload, {}, {})


def read_payload(body: bytes) -> Payload:
    """What is to be scored of a body that `write_payload` made: at temperature 1, since the frame has none.

    Raises BatchError when the body is damaged.
    """
    upload = read_stored_upload(body)
    groups = upload.groups()
    return Payload(groups, [1.0] * len(groups), partial(_with_scores, upload))


def read_stored_upload(body: bytes) -> LegacyUpload:
    """The upload that `write_payload` stored. Raises BatchError when the body is damaged."""
    base, tensors = _load(body)
    return LegacyUpload(base, json.loads(base)["plen"], tensors["inputs"], tensors["rewards"], tensors.get("gen_logps"))


def scored_frame(body: bytes) -> bytes:
    """A scored body as the frame for the protocol's trainers: JSON, inputs, rewards, refs, and gen_logps if present.

    Raises BatchError when the body is damaged.
    """
    base, tensors = _load(body)
    order = ["inputs", "rewards", "refs", *(["gen_logps"] if "gen_logps" in tensors else [])]
    return join_frame([base.encode(), *(write_tensor(tensors[name]) for name in order)])


def _with_scores(upload: LegacyUpload, scores: Scores) -> bytes:
    """The body with the reference's log-probs. Raises BatchError when they are not finite."""
    rows, length = upload.inputs.shape
    refs = np.concatenate(scores.logps).reshape(rows, length - upload.plen)
    if not np.isfinite(refs).all():
        raise BatchError("refs", "must be finite")
    return _save(upload, {"refs": torch.from_numpy(refs)}, {"reference_version": str(scores.reference_version)})


def _save(upload: LegacyUpload, scores: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    tensors = {"inputs": upload.inputs, "rewards": upload.rewards, **scores}
    if upload.gen_logps is not None:
        tensors["gen_logps"] = upload.gen_logps
    return safetensors.torch.save(tensors, {"format": FORMAT, "base": upload.base, **metadata})


def _load(body: bytes) -> tuple[str, dict[str, Tensor]]:
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        return header["__metadata__"]["base"], safetensors.torch.load(body)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise BatchError("body", f"must be a safetensors file of format {FORMAT!r}: {error}") from None
