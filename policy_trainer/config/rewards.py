"""How completions are judged, beside the names of the rewards."""

from pydantic import Field

from policy_trainer.config.sections import Section


class RewardModelConfig(Section):
    """Reward `model`: a sequence-classification model that scores prompt and completion."""

    path: str | None = None
    """Directory or hub id; wanted where rewards name `model`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: str = "cpu"
    """Where it runs."""
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16|float16|auto)$")
    """Precision of its weights."""
    batch_size: int = Field(default=16, ge=1)
    """Completions scored together."""
    max_length: int = Field(default=2048, ge=1)
    """Texts are cut to so many tokens, at their beginning."""


class PenaltyConfig(Section):
    """What the penalties `length`, `repetition` and `soft_overlong` are measured by."""

    length_tokens: int = Field(default=512, ge=1)
    """length: -1 at so many tokens, in proportion below."""
    repetition_ngram: int = Field(default=3, ge=1)
    """repetition: words of a piece of text that is looked for again."""
    repetition_max: float = Field(default=1.0, gt=0)
    """repetition: what a text of nothing but repetition loses."""
    overlong_tokens: int = Field(default=128, ge=1)
    """soft_overlong: the last tokens before sampling.max_completion_length, over which the penalty grows to 1 (DAPO)."""


class JudgingConfig(Section):
    """How completions are judged."""

    seconds: float = Field(default=5.0, gt=0, le=86_400)
    """Time limit for judging one completion by one reward that may hang; what exceeds it is killed. A day at most."""
    memory_gib: float = Field(default=4.0, ge=0)
    """Memory of the process that judges by such rewards, in GiB; 0 is no limit, as CUDA in one's own reward wants."""
    steps: bool = False
    """Have the task judge the steps of completions too, as loss.advantage = process wants it."""
    model: RewardModelConfig = RewardModelConfig()
    penalty: PenaltyConfig = PenaltyConfig()
