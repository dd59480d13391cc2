"""The objective on a device that has no float64, as Apple's GPUs (MPS). None is here: the CPU plays one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from policy_trainer.algorithms.objective import aggregation
from policy_trainer.algorithms.objective.aggregation import AGGREGATIONS, Totals, token_weights
from policy_trainer.algorithms.objective.corrections import importance_sampling_weights
from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.loss import token_loss
from policy_trainer.algorithms.objective.ratios import RATIOS
from policy_trainer.algorithms.surrogates import sums
from policy_trainer.config import LossConfig
from shared.devices import widest_float


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        assert not (isinstance(result, torch.Tensor) and result.dtype == torch.float64), f"{function} makes float64"
        return result


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (sums, aggregation):
        monkeypatch.setattr(module, "widest_float", lambda device: widest_float(torch.device("mps")))
    with NoFloat64():
        yield


IDS = torch.tensor([0, 0, 1, 1, 1])
MASK = torch.tensor([True, True, True, False, True])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("level", RATIOS)
def test_the_loss(level: str) -> None:
    logps = torch.linspace(-2, -1, 5).requires_grad_()
    tokens = LossInputs(IDS, MASK, torch.ones(5), old_logps=torch.full((5,), -1.5), ref_logps=torch.full((5,), -1.2))
    config = LossConfig.model_validate({"importance_sampling_level": level})
    token_loss(logps, tokens, config).loss.sum().backward()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction(level: str) -> None:
    correction = {"importance_sampling_correction": "tis", "correction_level": level}
    config = LossConfig.model_validate({"old_logps": "recomputed", **correction})
    importance_sampling_weights(torch.zeros(5), torch.zeros(5), IDS, MASK, config)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_weights(name: str) -> None:
    assert token_weights(name, IDS, MASK, Totals(2, 4, 3)).sum() > 0
