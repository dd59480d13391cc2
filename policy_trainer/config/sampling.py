"""How completions are sampled, and what samples them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.marks import Resume, Section, Travel
from shared.batch import MAX_TEMPERATURE, MIN_TEMPERATURE
from shared.settings import InHelp


class SamplingConfig(Section):
    """How completions are sampled."""

    num_generations: Annotated[int, Resume.FREE, InHelp("train doctor")] = Field(default=8, ge=1, le=65_536)
    """Completions per prompt: the group size G."""
    prompts_per_round: Annotated[int, Resume.FREE] = Field(default=8, ge=1, le=65_536)
    """Prompts that a worker samples together."""
    max_completion_length: Annotated[int, InHelp("train doctor eval")] = Field(default=512, ge=1)
    """Maximum tokens of a completion; longer ones are cut off."""
    temperature: Annotated[float, InHelp("eval")] = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Logits are divided by it in sampling, scoring and training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample among the likeliest tokens whose probabilities sum to top_p; 1 turns it off. The learner
    does not renormalise, so below 1 the ratio is biased."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 turns it off. The learner does not renormalise, so the ratio is biased."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than min_p times the likeliest one; 0 turns it off. It biases the ratio as top_p
    does."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, tokens that the prompt or the completion has already become less likely, also in evaluations; 1 turns it
    off. The learner does not apply it, so the ratio is biased."""
    stop: Annotated[CliVariadicArg[list[Annotated[str, Field(min_length=1)]]], Travel.TEXT] = Field(default=[])
    """Texts that end a completion, besides the model's EOS tokens. Give one with a comma as JSON: '["a,b"]'."""

    max_logp_difference: float = Field(default=1.0, gt=0)
    """After each update of its weights a worker compares its log-probs of a few tokens with the trainer's. It stops if
    they differ by more than this many nats on average, since it would not sample from the policy being trained."""
    max_resamples: Annotated[int, Resume.FREE] = Field(default=0, ge=0)
    """Dynamic sampling: replace a group whose rewards are all equal by another problem's, at most this many times."""
    regroup: Annotated[int, Resume.FREE] = Field(default=0, ge=0)
    """Regrouping: keep a group whose rewards are all equal for this many rounds, sample its problem again in them, and
    make a group of all its completions once their rewards differ. 0 turns it off."""

    @model_validator(mode="after")
    def _check_regroup(self) -> "SamplingConfig":
        if self.regroup and self.num_generations < 2:
            raise ValueError("sampling.regroup: rewards of a group of 1 never differ: use more num_generations")
        if self.regroup and self.max_resamples:
            raise ValueError("sampling.regroup: max_resamples replaces the problems that it keeps: use one of them")
        if self.regroup and self.prompts_per_round < 2:
            raise ValueError(
                "sampling.regroup: a round of one prompt has no place for a kept one: use more prompts_per_round"
            )
        return self


SamplerName = Literal["hf", "vllm", "vllm-server"]


class VllmConfig(Section):
    """The engine of sampler vllm, by vLLM's own names. A server of sampler vllm-server has options of its own."""

    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the GPU's memory for the engine, its weights included. 0.9 suits a GPU that nothing else uses."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: what data.max_prompt_length and
    sampling.max_completion_length need."""
    enforce_eager: bool = False
    """Neither compile the model nor capture CUDA graphs: starts sooner, samples more slowly."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that share the model."""
    enable_sleep_mode: bool = False
    """Trainer and workers take turns on the GPU that they share: vLLM sleeps while the trainer steps, and gives its
    memory back. Also for sampler vllm-server."""
