"""Rewards: pure functions of a sample. What may hang is judged in a process of its own.

Importing this is cheap, for that process's sake: no PyTorch, no settings.
"""

from collections.abc import Mapping

from policy_trainer.data.sample import Reward, Sample
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
