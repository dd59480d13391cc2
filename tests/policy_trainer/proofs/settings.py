"""Random settings of the loss, over everything that combines."""

import random
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from policy_trainer.algorithms.surrogates import Surrogates
from policy_trainer.config import LossConfig, TrainConfig


def choices(name: str) -> tuple[Any, ...]:
    """The names that a setting knows; of an optional one, None besides."""
    annotation: Any = LossConfig.model_fields[name].annotation
    names = [choice for part in get_args(annotation) for choice in (get_args(part) or (part,))]
    return tuple(None if choice is type(None) else choice for choice in names if choice is not str)


def setting_exists(name: str) -> bool:
    """Whether `policy-trainer train` has a setting of this dotted name."""
    section: Any = TrainConfig
    for part in name.split("."):
        assert issubclass(section, BaseModel)
        if part not in section.model_fields:
            return False
        section = section.model_fields[part].annotation
    return True


def random_masks(rng: random.Random) -> dict[str, float]:
    """Bounds that some tokens exceed, of some of the masks."""
    bounds = {
        "off_policy_sequence": rng.uniform(0.01, 0.3),
        "geometric_low": rng.uniform(0.6, 0.95),
        "geometric_high": rng.uniform(1.05, 1.5),
        "dppo_low": rng.uniform(0.01, 0.1),
        "dppo_high": rng.uniform(0.01, 0.1),
        "ipo": rng.uniform(0.02, 0.15),
    }
    return {name: bound for name, bound in bounds.items() if rng.random() < 0.25}


def random_surrogates(rng: random.Random) -> dict[str, dict[str, float]]:
    """The settings of each surrogate, which are all numbers above 0."""
    sections = {name: type(section) for name, section in Surrogates()}
    return {name: {key: rng.uniform(0.5, 2.5) for key in cls.model_fields} for name, cls in sections.items()}


def is_refused(**fixed: Any) -> bool:
    """Whether these settings are refused, with a KL penalty and without one."""
    for beta in (0.0, 0.1):
        try:
            LossConfig.model_validate(fixed | {"beta": beta})
            return False
        except ValidationError:
            continue
    return True


def random_settings(rng: random.Random, **fixed: Any) -> LossConfig:
    """fixed: settings that are given. What is refused is drawn again."""
    while True:
        drawn: dict[str, Any] = {
            name: rng.choice(choices(name))
            for name in (
                "advantage", "advantage_std", "scale_rewards", "truncated", "old_logps", "surrogate",
                "importance_sampling_level", "aggregation", "kl", "kl_in", "kl_weight",
                "importance_sampling_correction", "correction_level",
            )
        }  # fmt: skip
        drawn |= {
            "distillation_coef": rng.choice((None, None, rng.uniform(0.1, 2))),
            "drop_zero_variance": rng.random() < 0.5,
            "advantage_eps": rng.choice((1e-4, 1e-8, 0.1)),
            "epsilon": rng.uniform(0.05, 0.4),
            "epsilon_high": rng.choice((None, rng.uniform(0.05, 0.6))),
            "delta": rng.choice((None, rng.uniform(1.65, 2))),
            **random_surrogates(rng),
            "beta": rng.choice((0.0, rng.uniform(0.01, 1))),
            "correction_max": rng.uniform(1.05, 2),
            "correction_low": rng.uniform(0.2, 0.95),
            "correction_high": rng.uniform(1.05, 2),
            "mask": random_masks(rng),
            "echo_coef": rng.choice((0.0, 0.0, rng.uniform(0.01, 1))),
            "mismatch_penalty": rng.choice((0.0, rng.uniform(0.01, 1))),
            "entropy": {"coef": rng.choice((0.0, rng.uniform(0.01, 0.2)))},
            "top_entropy_quantile": rng.choice((1.0, 1.0, rng.random())),
        }
        if drawn["importance_sampling_correction"] == "tis":
            drawn["correction_min"] = rng.choice((None, rng.uniform(0.2, 0.95)))
        try:
            return LossConfig(**(drawn | fixed))
        except ValidationError:
            continue
