"""Models of one architecture whose weights differ."""

import torch
from transformers import PreTrainedModel

from policy_trainer.demo.base_model import make_model
from tests.device import DEVICE


def changed_model(by: float) -> PreTrainedModel:
    changed = make_model(0).to(DEVICE)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += by
    return changed.eval()


def randomly_changed_model() -> PreTrainedModel:
    changed, generator = make_model(0).to(DEVICE), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return changed.eval()
