"""Checks that a completion consists of a think block and an answer block, and nothing else."""

import re

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.answers import TAGS

_SPACE = re.compile(r"</think>\s*<answer>")


def format_reward(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\s*<answer>.*?</answer>$` (DOTALL), else 0."""
    return float(matches_whole(sample.completion, _SPACE))


def tags_reward(sample: Sample) -> float:
    """1 for a think and an answer block with each of the four tags exactly once, else 0.

    Closing tags count too: a policy learns to exploit a reward for opening tags alone within twenty steps.
    """
    return format_reward(sample) if each_tag_once(sample.completion) else 0.0


def matches_whole(completion: str, seam: re.Pattern[str]) -> bool:
    """Whether `^<think>.*?SEAM.*?</answer>$` (DOTALL) matches, in linear time.

    seam: matches from `</think>` to `<answer>`. Only the first seam is tried: if the text after it does not end with
    `</answer>`, neither does the shorter text after a later one.
    """
    text = completion.removesuffix("\n")  # `$` also matches before a final line end
    found = seam.search(text, len("<think>"))
    return text.startswith("<think>") and found is not None and text.endswith("</answer>", found.end())


def each_tag_once(completion: str) -> bool:
    return all(completion.count(tag) == 1 for tag in TAGS)
