"""LoRA: small matrices beside frozen weights are all that trains (Hu et al., arXiv 2106.09685)."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import CliVariadicArg

from policy_trainer.config.sections import Section, Travel


class LoraConfig(Section):
    """Train adapters beside the frozen weights of the model (LoRA)."""

    rank: Annotated[int, Travel.PUBLISHED] = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights of the model instead."""
    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    target_modules: CliVariadicArg[list[str]] = Field(default=["all-linear"], min_length=1)
    """Linear layers that get an adapter, by the ends of their names, such as q_proj v_proj. all-linear: all but the LM
    head."""
