"""Rewards of two GSM8K recipes: Simple-GRPO, and A. Burkov's Language Models Book."""

import math
import re
from collections import deque

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.answers import MAX_ANSWER_CHARACTERS
from policy_trainer.rewards.mathematics import read_number, same
from policy_trainer.rewards.tags import each_tag_once, matches_whole

# The same matches as `\d+\.\d+|\d+/\d+|\d+`.
_NUMBER = re.compile(r"\d+(?:[./]\d+)?")
_SEAM = re.compile(r"</think>[\n ]*<answer>")
_BOOK_NUMBER = re.compile(r"-?\d*\.?\d+")
_BOOK_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def simple_grpo_accuracy(sample: Sample) -> float:
    """+1 if math-verify finds the last number of the completion equal to the gold answer, else -1."""
    expected = read_number(sample.problem.answer)
    if not expected:
        return math.nan
    number = last_number(sample.completion)
    if number is None or len(number) > MAX_ANSWER_CHARACTERS:
        return -1.0
    return 1.0 if same(expected, read_number(number)) else -1.0


def last_number(text: str) -> str | None:
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0][0] if numbers else None


def simple_grpo_format(sample: Sample) -> float:
    r"""+1.25 for `^<think>.*?</think>[\n ]*<answer>.*?</answer>$` (DOTALL) and two tags of each kind, else -1."""
    right = matches_whole(sample.completion, _SEAM) and each_tag_once(sample.completion)
    return 1.25 if right else -1.0


def lm_book_correct(sample: Sample) -> float:
    """2 if the text in the last answer tags is the gold answer; 1.5 if both contain one number, and these are equal;
    else 0."""
    answer, gold = _book_answer(sample.completion), sample.problem.answer.strip()
    if answer == gold:
        return 2.0
    number = _only_number(answer)
    return 1.5 if number is not None and number == _only_number(gold) else 0.0


def lm_book_tags(sample: Sample) -> float:
    """0.2 for each of the four tags that occurs."""
    return 0.2 * sum(tag in sample.completion for tag in _BOOK_TAGS)


def _book_answer(completion: str) -> str | None:
    """The text from the last opening tag to the next closing tag; None for `...`, which the prompt contains."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    answer = answer.strip()
    return answer if opened and closed and answer != "..." else None


def _only_number(text: str | None) -> float | None:
    numbers = _BOOK_NUMBER.findall(text or "")
    return float(numbers[0]) if len(numbers) == 1 else None
