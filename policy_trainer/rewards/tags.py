"""Whether a completion is a think block and an answer block, and nothing else."""

import re

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.answers import TAGS

_SPACE = re.compile(r"</think>\s*<answer>")


def format_reward(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\s*<answer>.*?</answer>$` (DOTALL), else 0."""
    return float(matches_whole(sample.completion, _SPACE))


def tags_reward(sample: Sample) -> float:
    """1 for the think and answer blocks with each of the four tags exactly once, else 0.

    Counting only opening tags is exploited within twenty steps.
    """
    return format_reward(sample) if each_tag_once(sample.completion) else 0.0


def matches_whole(completion: str, seam: re.Pattern[str]) -> bool:
    """Whether `^<think>.*?SEAM.*?</answer>$` (DOTALL) matches, in linear time.

    seam: from `</think>` to `<answer>`. The first one leaves most room for the end, so that no other need be tried.
    """
    text = completion.removesuffix("\n")  # before which `$` matches too
    found = seam.search(text, len("<think>"))
    return text.startswith("<think>") and found is not None and text.endswith("</answer>", found.end())


def each_tag_once(completion: str) -> bool:
    return all(completion.count(tag) == 1 for tag in TAGS)
