"""Settings of the curves: each algorithm on the demo's task, with the demo's model, rates and sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.base_models import DATA, cached_countdown_model, cached_teacher
from policy_trainer.cli.demo.base_model import cached_base_model
from policy_trainer.config import (
    CheckpointConfig,
    EvaluationConfig,
    JudgingConfig,
    LossConfig,
    OptimizerConfig,
    PenaltyConfig,
    ReferenceConfig,
    TrainConfig,
)
from policy_trainer.config.presets import PRESETS
from shared.settings import from_values

# Updates of a step. With several, the policy leaves the one that sampled: what bounds that acts.
MINIBATCHES = 4


def _recomputed(**settings: object) -> LossConfig:
    return LossConfig.model_validate({"beta": 0, "old_logps": "recomputed", **settings})


def _masked(**settings: object) -> LossConfig:
    return LossConfig.model_validate({"beta": 0, **settings})


ALGORITHMS: Mapping[str, LossConfig] = {
    "rloo": _recomputed(advantage="rloo"),
    "sapo": _recomputed(surrogate="sapo"),
    "tis": _recomputed(importance_sampling_correction="tis"),
    "gdpo": _recomputed(advantage="gdpo"),
    "vespo": _recomputed(surrogate="vespo", aggregation="token_mean"),
    "luspo": _recomputed(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, aggregation="luspo"),
    "icepop": _recomputed(importance_sampling_correction="mask"),
    "log_linear": _recomputed(importance_sampling_correction="tis", old_logps="log_linear"),
    "off_policy_sequence": _masked(mask={"off_policy_sequence": 0.5}),
    "geometric": _masked(mask={"geometric_low": 0.5, "geometric_high": 2}),
    # As verl and prime-rl have them: a mask in place of the clip, and a mean over tokens.
    "dppo": _masked(
        surrogate="cispo", cispo={"ratio_max": 20}, mask={"dppo_low": 0.15, "dppo_high": 0.15}, aggregation="token_mean"
    ),
    "ipo": _masked(
        surrogate="cispo",
        cispo={"ratio_max": 20},
        mask={"ipo": 0.1},
        mismatch_penalty=1e-3,
        aggregation="token_mean",
    ),
    "entropy_bonus": _recomputed(entropy={"coef": 0.01}),
    # The base model begins at about this entropy.
    "adaptive_entropy": _recomputed(entropy={"target": 0.3, "delta": 0.001, "max": 0.05}),
    "top_entropy": _recomputed(top_entropy_quantile=0.2),
}


BASE_MODELS = Path("runs/base_models")
# Steps between renewals, for presets that renew their reference: the published interval is longer than a whole run.
RENEW_EVERY = 25
EVALUATIONS = 20
# Held-out problems of an evaluation.
PROBLEMS = 256
# DAPO's penalty, in proportion to completions of 40 tokens.
OVERLONG_TOKENS = 8
# The learning rate of a whole step. Its updates share it, so that more updates do not mean a larger step.
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, warmup_steps=10, min_lr_rate=0.1, max_grad_norm=1.0)
COUNTDOWN = "countdown"
# Factor on the steps, since countdown is learnt more slowly.
COUNTDOWN_STEPS = 3


@dataclass(frozen=True)
class RunSetup:
    """Paths, seed and steps of a run. snapshots: --snapshot-root of the server that renews its reference."""

    snapshots: Path
    run_dir: Path
    seed: int
    steps: int


# By the page that shows them.
PAGES: Mapping[str, Sequence[str]] = {"curves": [*PRESETS, COUNTDOWN], "algorithms": [*ALGORITHMS]}


def names() -> list[str]:
    return [name for page in PAGES.values() for name in page]


def base_model(name: str) -> Path:
    """One model for all seeds, so that one server can score all runs."""
    make = cached_countdown_model if name == COUNTDOWN else cached_base_model
    return make(BASE_MODELS, 0, lambda done, total: None)


def recipe(name: str, setup: RunSetup) -> TrainConfig:
    if name == COUNTDOWN:
        return _countdown(replace(setup, steps=COUNTDOWN_STEPS * setup.steps))
    if name in ALGORITHMS:
        algorithm = {"rewards": ["accuracy", "tags"], "loss": ALGORITHMS[name], "minibatches": MINIBATCHES}
        return _config(base_model(name), setup, task="arithmetic", **algorithm)
    return _of_preset(name, setup)


def _of_preset(name: str, setup: RunSetup) -> TrainConfig:
    """The algorithm is the preset's: loss, cadence, renewal, dynamic sampling, penalties. All else is the demo's."""
    preset = PRESETS[name].config()
    distilled = preset.loss.advantage == "distill"
    overlong = "soft_overlong" in preset.rewards
    return _config(
        base_model(name),
        setup,
        task="arithmetic",
        rewards=["accuracy", "tags", *(["soft_overlong"] if overlong else [])],
        judging=JudgingConfig(steps=preset.judging.steps, penalty=PenaltyConfig(overlong_tokens=OVERLONG_TOKENS)),
        max_resamples=preset.sampling.max_resamples,
        loss=preset.loss,
        num_iterations=preset.num_iterations,
        minibatches=preset.minibatches,
        publish_every=preset.publish_every,
        renewed=bool(preset.reference.sync_steps),
        teacher=str(cached_teacher(BASE_MODELS)) if distilled else None,
    )


def _countdown(setup: RunSetup) -> TrainConfig:
    """Three numbers from 1 to 9, + and -, with the default GRPO: problems as the task generates them."""
    return _config(base_model(COUNTDOWN), setup, task="countdown", rewards=[], data=DATA, loss=LossConfig())


def _config(base: Path, setup: RunSetup, *, renewed: bool = False, **fields: Any) -> TrainConfig:
    """renewed: whether the reference is renewed. fields: of TrainConfig; resamples of groups as `max_resamples`."""
    sampling = {"num_generations": 8, "prompts_per_round": 16, "max_completion_length": 40}
    sampling["max_resamples"] = fields.pop("max_resamples", 0)
    updates = fields.get("num_iterations", 1) * fields.get("minibatches", 1)
    renewal = ReferenceConfig(sync_steps=RENEW_EVERY, snapshot_root=setup.snapshots)
    return from_values(
        TrainConfig,
        model=str(base),
        seed=setup.seed,
        threads=1,
        run_dir=setup.run_dir,
        max_steps=setup.steps,
        groups_per_step=16,
        sampling=sampling,
        optimizer=OPTIMIZER.model_copy(update={"learning_rate": OPTIMIZER.learning_rate / updates}),
        reference=renewal if renewed else ReferenceConfig(),
        checkpoint=CheckpointConfig(save_steps=setup.steps, save_total_limit=1),
        evaluation=EvaluationConfig(eval_steps=max(1, setup.steps // EVALUATIONS), problems=PROBLEMS, batch_size=128),
        **fields,
    )
