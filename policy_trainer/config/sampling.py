"""How completions are sampled."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import CliVariadicArg

from policy_trainer.config.sections import Section


class SamplingConfig(Section):
    """How completions are sampled."""

    num_generations: int = Field(default=8, ge=1)
    """Completions for each prompt: G."""
    prompts_per_round: int = Field(default=8, ge=1)
    """Prompts that a worker samples together."""
    max_completion_length: int = Field(default=512, ge=1)
    """Completions are cut off here."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it, in sampling, scoring and training alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. The learner does not renormalise: below 1 the ratio is biased."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 is off. The learner does not renormalise."""
    stop: CliVariadicArg[list[Annotated[str, Field(min_length=1)]]] = Field(default=[])
    """Texts that end a completion besides the model's EOS tokens. One with a comma is given as JSON: '["a,b"]'."""

    max_resamples: int = Field(default=0, ge=0)
    """Dynamic sampling: a group whose rewards are all equal is given up for another problem, so many times at most."""
