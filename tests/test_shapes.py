"""Annotations with shapes are checked in tests."""

import pytest
import torch
from jaxtyping import TypeCheckError

from policy_trainer.learner.host_memory import begin


def test_a_call_with_other_shapes_or_dtypes_fails() -> None:
    host = torch.zeros(3)
    begin(host, torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(TypeCheckError, match="gradient"):
        begin(host, torch.ones(1))  # which PyTorch would broadcast
    with pytest.raises(TypeCheckError, match="gradient"):
        begin(host, torch.ones(3, dtype=torch.int64))
