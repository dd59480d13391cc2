"""What training made of a batch: kept beside it on the server, so that people can look at it afterwards."""

from dataclasses import dataclass

import numpy as np
import safetensors.numpy

from shared import tensor_file
from shared.batch import Array, BatchError, check_logps, check_tensor
from shared.tensor_file import Layout, number, required

FORMAT = "training/1"
_LAYOUT = Layout("training", {"advantages": "F32", "logps": "F32"}, {"format", "step"})


@dataclass(frozen=True, eq=False)
class Training:
    """One batch in one training step.

    step: training steps done, this one included. advantages: float32 (C,), those it trained with, 0 where it did not.
    logps: float32 (C,), of the policy after that step, at the batch's temperature. Raises BatchError if a field is
    invalid.
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
        """Raises BatchError unless it is of a batch with so many tokens in its completions."""
        check_tensor("advantages", self.advantages, np.float32, completion_tokens)


def encode(training: Training) -> bytes:
    """As a safetensors file."""
    tensors = {name: np.ascontiguousarray(getattr(training, name)) for name in _LAYOUT.dtypes}
    return safetensors.numpy.save(tensors, {"format": FORMAT, "step": str(training.step)})


def decode(body: bytes) -> Training:
    """Untrusted bytes -> checked. Raises BatchError naming the first invalid field."""
    metadata, tensors = tensor_file.parse(body, _LAYOUT)
    if required(metadata, "format") != FORMAT:
        raise BatchError("format", f"must be {FORMAT!r}, got {metadata['format'][:40]!r}")
    return Training(number(metadata, "step", int), required(tensors, "advantages"), required(tensors, "logps"))
