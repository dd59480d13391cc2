"""`auto` is the GPU where there is one; a device that is not there is refused by name."""

import pytest
import torch

from shared.devices import choose_device, describe_device, deterministic_operations
from shared.errors import UserError


@pytest.fixture(params=[0, 2])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU at {device.index}")
    return request.param


def test_auto(gpus: int) -> None:
    assert str(choose_device("auto")) == ("cuda:0" if gpus else "cpu")
    assert describe_device("auto") == ("cuda:0 (a GPU at 0)" if gpus else "cpu")


def test_a_device_that_is_named_is_taken(gpus: int) -> None:
    for name in ("cpu", *(["cuda", "cuda:1"] if gpus else [])):
        assert choose_device(name) == torch.device(name)


def test_a_gpu_that_is_not_there(gpus: int) -> None:
    reason = "the last GPU is cuda:1" if gpus else "PyTorch finds no GPU"
    with pytest.raises(UserError, match=f"device: there is no cuda:2 here: {reason}; use auto or cpu"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x"])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(UserError, match=f"device: '{name}' is no device of PyTorch's; use auto"):
        choose_device(name)


def test_deterministic_operations_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_operations(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_operations(torch.device("cpu")):  # a CPU's are exact, and would only get slower
        assert not torch.are_deterministic_algorithms_enabled()
