"""Rewards: pure functions of a sample. Rewards that may hang run in a sandbox process.

The sandbox imports this package, so importing it must stay cheap: no PyTorch, no settings.
"""

from collections.abc import Mapping

from policy_trainer.data.problem import Reward, Sample
from policy_trainer.rewards.answers import TAGS, Comparison, accuracy, equal_number, equal_text, parse_answer
from policy_trainer.rewards.mathematics import equal_math

COMPARISONS: Mapping[str, Comparison] = {"exact": equal_text, "number": equal_number, "math": equal_math}

__all__ = [
    "COMPARISONS",
    "TAGS",
    "Comparison",
    "Reward",
    "Sample",
    "accuracy",
    "equal_math",
    "equal_number",
    "equal_text",
    "parse_answer",
]
