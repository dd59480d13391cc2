"""How completions are judged: limits, step rewards, the reward model, servers, penalties."""

from typing import Annotated

from pydantic import Field

from policy_trainer.config.marks import Resume, Section, Travel
from shared.settings import Dtype


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
    math-verify. The process is killed when it takes longer. A call with many completions has this for each of them.
    One day at most."""
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
