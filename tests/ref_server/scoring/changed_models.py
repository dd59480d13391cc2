"""Models of one architecture whose weights differ."""

import torch
from transformers import PreTrainedModel

from policy_trainer.cli.demo.base_model import make_model
from tests.device import on_device


def changed_model(by: float) -> PreTrainedModel:
    changed = on_device(make_model(0))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += by
    return changed.eval()


def randomly_changed_model() -> PreTrainedModel:
    changed, generator = on_device(make_model(0)), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return changed.eval()
