"""Forwards of a model whose layers are on several devices. There are two only in a process that makes them up."""

import subprocess
import sys

import pytest
import torch
from torch.utils import backend_registration

_PROGRAM = """
import sys
import torch
from policy_trainer.cli.demo.base_model import make_model
from shared.logprobs import PackedForward, PaddedForward, PlainForward, choose_forward
from shared.logprobs.choice import _test_groups
from tests.rounding import rounding
from tests.shared.logprobs.two_devices import spread, two_devices

groups = _test_groups(260, None, False), [1.0, 0.7]
with torch.no_grad():
    expected = choose_forward(make_model(0).eval())(*groups)
with torch.no_grad(), two_devices():
    model = spread(make_model(0).eval(), sys.argv[1])
    assert {str(weights.device) for weights in model.parameters()} == {"fake:0", "fake:1"}
    assert choose_forward(model).name == "packed", "the self-test takes the fastest"
    for forward in (PlainForward, PaddedForward, PackedForward):
        got = forward(model)(*groups).cpu()
        assert (got - expected).abs().max() < rounding(expected.abs().max()), forward.name
    try:
        torch.ones(2, device="fake:0") + torch.ones(2, device="fake:1")
    except AssertionError as error:
        print("refused:", error)
"""


needs_backend = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"PyTorch {torch.__version__} has no devices that are written in Python",
)


def output_of(program: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@needs_backend
@pytest.mark.slow
@pytest.mark.parametrize("head", ["fake:0", "fake:1"])
def test_every_forward_of_a_spread_model_is_right(head: str) -> None:
    assert "refused: aten.add.Tensor of tensors on" in output_of(_PROGRAM, head)
