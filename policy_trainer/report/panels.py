"""The curves of a page: which metrics stand together, with the units and healthy bands of docs/metrics.md."""

from dataclasses import dataclass

from policy_trainer.reporting.health import BANDS


@dataclass(frozen=True)
class Panel:
    """Curves on common axes.

    steps, evaluations: names of metrics of these records, the most important first; one that ends in `/` stands for all
    that begin with it. unit, healthy: of the first one. low, high: the healthy band, where it is the same in all runs.
    interval: whether the evaluations' `low` and `high` surround the first of them.
    """

    title: str
    steps: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ()
    unit: str = ""
    healthy: str = ""
    low: float | None = None
    high: float | None = None
    interval: bool = False

    @property
    def kind(self) -> str:
        """Of the first metric."""
        return "step" if self.steps else "evaluation"

    @property
    def first(self) -> str:
        return (self.steps or self.evaluations)[0]


_CLIP, _ESS, _STALENESS = (BANDS[name] for name in ("clip_ratio", "effective_sample_size", "staleness"))
PANELS = (
    Panel("Reward", ("reward", "reward/"), healthy="rising"),
    Panel("Accuracy on held-out problems or pairs", (), ("accuracy",), healthy="rising", interval=True),
    Panel("Reward on held-out problems", (), ("reward",), healthy="rising"),
    Panel("Loss", ("loss",), ("eval_loss",)),
    Panel("Perplexity of held-out rows", (), ("perplexity",)),
    Panel("Accuracy on training pairs", ("accuracy",)),
    Panel("Margin of the scores", ("reward_margin",), ("reward_margin",)),
    Panel("KL to the reference", ("kl",), (), "nats a token", "below 1, not tripling in 20 steps"),
    Panel("KL to the teacher", ("teacher_kl",), (), "nats a token", "falling"),
    Panel(
        "Entropy", ("entropy",), (), "nats a token",
        "above a tenth of its beginning; a hundredth where the reward rises",
    ),
    Panel(
        "Clipped tokens", ("clip_ratio", "clip_ratio_low", "clip_ratio_high"), (), "",
        "0.1 to 0.3; not 0 for 60 steps: the ratio is inert", _CLIP.low, _CLIP.high,
    ),
    Panel("Standard deviation of the reward", ("reward_std", "reward_std/"), healthy="above 0"),
    Panel("Groups whose rewards are all equal", ("frac_reward_zero_std",), healthy="at most 0.8"),
    Panel(
        "Length of completions", ("completion_length_mean", "completion_length_min", "completion_length_max"), (),
        "tokens",
    ),
    Panel("Cut off at the length limit", ("truncated",), healthy="not 0.1 above its beginning"),
    Panel(
        "Age of the weights that sampled", ("staleness", "staleness_max"), (), "steps", "at most 16", _STALENESS.low,
        _STALENESS.high,
    ),
    Panel("Effective sample size", ("effective_sample_size",), (), "share", "at least 0.5", _ESS.low, 1.0),
    Panel("Norm of the gradient", ("grad_norm",)),
    Panel("Learning rate", ("learning_rate",)),
    Panel("Share of time that waits", ("waiting_share", "sampler_waiting_share")),
)  # fmt: skip
