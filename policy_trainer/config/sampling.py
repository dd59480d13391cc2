"""How completions are sampled."""

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.sections import Section, Travel
from shared.bounds import MAX_TEMPERATURE, MIN_TEMPERATURE


class SamplingConfig(Section):
    """How completions are sampled."""

    num_generations: int = Field(default=8, ge=1, le=65_536)
    """Completions per prompt: the group size G."""
    prompts_per_round: int = Field(default=8, ge=1, le=65_536)
    """Prompts that a worker samples together."""
    max_completion_length: int = Field(default=512, ge=1)
    """Maximum tokens of a completion; longer ones are cut off."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Logits are divided by it in sampling, scoring and training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample among the likeliest tokens whose probabilities sum to top_p; 1 turns it off. The learner
    does not renormalise, so below 1 the ratio is biased."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 turns it off. The learner does not renormalise, so the ratio is biased."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than min_p times the likeliest one; 0 turns it off. The ratio is biased as by
    top_p."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, tokens that the prompt or the completion has already become less likely, also in evaluations; 1 turns it
    off. The learner does not apply it, so the ratio is biased."""
    stop: Annotated[CliVariadicArg[list[Annotated[str, Field(min_length=1)]]], Travel.TEXT] = Field(default=[])
    """Texts that end a completion, besides the model's EOS tokens. Give one with a comma as JSON: '["a,b"]'."""

    max_logp_difference: float = Field(default=1.0, gt=0)
    """After each update of its weights a worker compares its log-probs of a few tokens with the trainer's. It stops
    where they differ by more than this many nats on average: it does not sample from the policy that is trained."""
    max_resamples: int = Field(default=0, ge=0)
    """Dynamic sampling: replace a group whose rewards are all equal by another problem's, at most this many times."""
    regroup: int = Field(default=0, ge=0)
    """Regrouping: keep a group whose rewards are all equal for this many rounds, sample its problem again in them, and
    make a group of all its completions once their rewards differ. 0 turns it off."""

    @model_validator(mode="after")
    def _check_regroup(self) -> "SamplingConfig":
        if self.regroup and self.num_generations < 2:
            raise ValueError("regroup: rewards of a group of 1 never differ: use more num_generations")
        if self.regroup and self.max_resamples:
            raise ValueError("regroup: max_resamples replaces the problems that it keeps: use one of them")
        if self.regroup and self.prompts_per_round < 2:
            raise ValueError("regroup: a round of one prompt has no place for a kept one: use more prompts_per_round")
        return self
