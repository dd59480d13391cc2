"""How completions are sampled, in one turn or several, and how they are judged: limits, the reward model, penalties."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.generation import with_generation_kwargs
from policy_trainer.config.marks import Resume, Travel
from shared.batch import MAX_TEMPERATURE, MIN_TEMPERATURE
from shared.settings import Dtype, InHelp, Section, Verbatim

# With sampling masks, the likeliest tokens that may be drawn where `top_k` sets no number: it bounds the masks' bytes.
MOST_KEPT = 512


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
    """Nucleus sampling: sample among the likeliest tokens whose probabilities sum to top_p; 1 turns it off. In
    training with the sampler hf all log-probs are renormalised over the tokens that top_p, top_k and min_p keep, at
    most the 512 likeliest unless top_k is set; with others the ratio is biased."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 turns it off. See top_p."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than min_p times the likeliest one; 0 turns it off. See top_p."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, tokens that the prompt or the completion has already become less likely, also in evaluations; 1 turns it
    off. The learner does not apply it, so the ratio is biased."""
    stop: Annotated[CliVariadicArg[list[Annotated[str, Field(min_length=1)]]], Travel.TEXT, Verbatim()] = Field(
        default=[]
    )
    """Texts that end a completion, besides the model's EOS tokens. The command line takes them as they stand; in bash
    $'\\n' is the end of a line."""

    stop_token_ids: CliVariadicArg[list[Annotated[int, Field(ge=0)]]] = Field(default=[])
    """Ids of tokens that end a completion, besides the model's EOS tokens. They are part of it."""
    generation_kwargs: Annotated[dict[str, Any], Travel.PRIVATE] = Field(default={})
    """These settings by the names of transformers' or vLLM's, as JSON on the command line; they replace those given
    otherwise, as in TRL. What changes the distribution without the trainer's knowledge is refused."""

    max_logp_difference: float = Field(default=1.0, gt=0)
    """After each update of its weights a worker compares its log-probs of a few tokens with the trainer's. It stops if
    they differ by more than this many nats on average, since it would not sample from the policy being trained."""
    max_resamples: Annotated[int, Resume.FREE] = Field(default=0, ge=0)
    """Dynamic sampling: replace a group whose rewards are all equal by another problem's, at most this many times."""
    regroup: Annotated[int, Resume.FREE] = Field(default=0, ge=0)
    """Regrouping: keep a group whose rewards are all equal for this many rounds, sample its problem again in them, and
    make a group of all its completions once their rewards differ. 0 turns it off."""

    @model_validator(mode="before")
    @classmethod
    def _take_generation_kwargs(cls, values: Any) -> Any:
        kwargs = values.get("generation_kwargs") if isinstance(values, dict) else None
        return with_generation_kwargs(values) if isinstance(kwargs, dict) else values

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

    @property
    def leaves_tokens_out(self) -> bool:
        """Whether some tokens of the vocabulary are never sampled, however the logits are."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class TurnsConfig(Section):
    """Rollouts of several turns, with `tools` or `environment`."""

    max_tool_calling_iterations: int | None = Field(default=None, ge=0)
    """How often a rollout may call tools and go on. Default: until it calls none, or ends at max_completion_length."""
    seconds: Annotated[float, Resume.FREE] = Field(default=60.0, gt=0, le=86_400)
    """Time limit in seconds of one call of a tool, and of an environment's reset and rewards. The process is killed
    when it takes longer."""
    rollout_seconds: Annotated[float | None, AfterValidator(lambda seconds: seconds or None), Resume.FREE] = Field(
        default=None, ge=0
    )
    """Time limit in seconds of one rollout, after which no tool is called. 0: no limit, as by default."""
    memory_gib: Annotated[float, Travel.LOCAL, Resume.FREE] = Field(default=4.0, ge=0)
    """Memory (address space) that each process of a rollout may add, in GiB: the one that runs its tools and its
    environment, each that these start, and the one that parses calls. 0: no limit, which tools that use CUDA need."""
    max_answer_characters: int = Field(default=20_000, ge=1)
    """Longer answers of tools are cut to this length, with a note of how much was left out."""
    call_format: Annotated[str | None, Travel.NAME] = None
    """How the model writes calls, by the family of its chat template. Default: that of the template."""


class VllmConfig(Section):
    """The engine of sampler vllm, by vLLM's own names, and of the servers that `launch` starts for sampler vllm-server.
    A server that you start has options of its own."""

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


class RewardModelConfig(Section):
    """Reward `model`: a sequence-classification model that scores prompt and completion."""

    path: str | None = None
    """Directory or Hub id of the reward model; required when `rewards` names `model`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    device: Annotated[str, Travel.LOCAL, Resume.FREE] = "auto"
    """Where the reward model runs: auto (the GPU if there is one, else the CPU), cpu, cuda:0, …"""
    dtype: Dtype = "float32"
    """Precision of the reward model's weights."""
    batch_size: Annotated[int, Resume.FREE] = Field(default=16, ge=1)
    """Completions scored in one forward."""
    max_length: int = Field(default=2048, ge=1)
    """Maximum tokens of prompt and completion together. Of a longer text only the last tokens are scored."""


class HttpRewardConfig(Section):
    """Rewards that are a URL: a server of yours judges the completions."""

    batch_size: int = Field(default=256, ge=1)
    """Completions in one request."""
    seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Time limit in seconds of one request; it is then sent again."""
    patience: float = Field(default=600.0, ge=0)
    """Seconds to keep retrying a server that does not answer, is overloaded or fails; then the run ends."""


class PenaltyConfig(Section):
    """Settings of the penalties `length`, `repetition` and `soft_overlong`."""

    length_tokens: int = Field(default=512, ge=1)
    """Penalty length: it falls linearly from 0 to -1 at this many tokens."""
    repetition_ngram: int = Field(default=3, ge=1)
    """Penalty repetition: number of words in the n-grams that are compared."""
    repetition_max: float = Field(default=1.0, gt=0)
    """Penalty repetition: this maximum times the share of n-grams that are repetitions is subtracted."""
    overlong_tokens: int = Field(default=128, ge=1)
    """Penalty soft_overlong (DAPO): it falls linearly from 0 to -1 over this many tokens, which end at
    sampling.max_completion_length."""


class JudgingConfig(Section):
    """How completions are judged."""

    seconds: Annotated[float, Resume.FREE] = Field(default=5.0, gt=0, le=86_400)
    """Time limit in seconds for one completion and one sandboxed reward: your own functions and those that use
    math-verify or mathruler. The process is killed when it takes longer. A call with many completions has this for each
    of them. One day at most."""
    memory_gib: Annotated[float, Travel.LOCAL, Resume.FREE] = Field(default=4.0, ge=0)
    """Memory limit of the sandbox process, in GiB. 0: no limit, which CUDA in a reward of your own needs."""
    workers: Annotated[int, Travel.LOCAL, Resume.FREE] = Field(default=1, ge=1)
    """Processes that judge side by side in a sandbox, each with memory_gib. Rewards that take many completions in one
    call use one of them."""
    steps: bool = False
    """Have the task judge the steps of each completion too, as loss.advantage = process needs."""
    model: RewardModelConfig = RewardModelConfig()
    http: Annotated[HttpRewardConfig, Resume.FREE] = HttpRewardConfig()
    penalty: PenaltyConfig = PenaltyConfig()
