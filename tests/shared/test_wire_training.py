"""Training data of a batch as bytes: it comes back bit for bit, and a wrong field is named."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy

from shared.batch import Array, BatchError, Training
from shared.wire import decode_training, encode_training

Tensors = dict[str, Array]
Metadata = dict[str, str]


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def parts() -> tuple[Tensors, Metadata]:
    tensors = {"advantages": floats(0.5, -1.5), "logps": floats(-0.25, 0.0)}
    return tensors, {"format": "training/1", "step": "12"}


def test_comes_back_bit_for_bit() -> None:
    training = Training(12, floats(0.1, 0.0, -3e38), floats(-1e-30, -2.5, -1e4))
    back = decode_training(encode_training(training))
    assert back.step == 12
    assert back.advantages.tobytes() == training.advantages.tobytes()
    assert back.logps.tobytes() == training.logps.tobytes()


def test_it_is_of_a_batch_with_as_many_tokens() -> None:
    training = decode_training(safetensors.numpy.save(*parts()))
    training.check_fits(2)
    with pytest.raises(BatchError, match=r"advantages must have shape \(3,\), got \(2,\)"):
        training.check_fits(3)


BREACHES: list[tuple[str, Callable[[Tensors, Metadata], object]]] = [
    ("format", lambda _, metadata: metadata.pop("format")),
    ("format", lambda _, metadata: metadata.update(format="rollout-batch/1")),
    ("step", lambda _, metadata: metadata.pop("step")),
    ("step", lambda _, metadata: metadata.update(step="1.0")),
    ("step", lambda _, metadata: metadata.update(step="-1")),
    ("step", lambda _, metadata: metadata.update(step="9223372036854775808")),
    ("run", lambda _, metadata: metadata.update(run="x")),
    ("rewards", lambda tensors, _: tensors.update(rewards=floats(1.0, 2.0))),
    ("reward/a", lambda tensors, _: tensors.update({"reward/a": floats(1.0, 2.0)})),
    ("logps", lambda tensors, _: tensors.pop("logps")),
    ("advantages", lambda tensors, _: tensors.pop("advantages")),
    ("logps", lambda tensors, _: tensors.update(logps=floats(-1.0))),
    ("logps", lambda tensors, _: tensors.update(logps=np.zeros(2, np.int64))),
    ("logps", lambda tensors, _: tensors.update(logps=np.zeros((1, 2), np.float32))),
    ("logps", lambda tensors, _: tensors.update(logps=floats(0.5, -1.0))),
    ("logps", lambda tensors, _: tensors.update(logps=floats(np.nan, -1.0))),
    ("advantages", lambda tensors, _: tensors.update(advantages=floats(np.inf, -1.0))),
    ("advantages", lambda tensors, _: tensors.update(advantages=floats(np.nan, -1.0))),
    ("logps", lambda tensors, _: tensors.update(logps=floats(), advantages=floats())),
]


@pytest.mark.parametrize(("field", "change"), BREACHES)
def test_a_wrong_field_is_named(field: str, change: Callable[[Tensors, Metadata], object]) -> None:
    tensors, metadata = parts()
    change(tensors, metadata)
    with pytest.raises(BatchError) as refused:
        decode_training(safetensors.numpy.save(tensors, metadata))
    assert refused.value.field == field


def test_every_truncation_is_refused() -> None:
    body = safetensors.numpy.save(*parts())
    for length in range(len(body)):
        with pytest.raises(BatchError):
            decode_training(body[:length])


def test_a_claimed_length_is_checked_against_the_body() -> None:
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    header = json.dumps({"logps": tensor, "__metadata__": parts()[1]}).encode()
    with pytest.raises(BatchError) as refused:
        decode_training(len(header).to_bytes(8, "little") + header)
    assert refused.value.field == "body"
    with pytest.raises(BatchError, match="header they claim"):
        decode_training((2**62).to_bytes(8, "little") + header)
