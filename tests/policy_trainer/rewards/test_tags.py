"""`format` and `tags`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.tags import format_reward, tags_reward

WHOLE = "<think>1+1</think><answer>2</answer>"
# completion, score of `format`, score of `tags`
TABLE = (
    (WHOLE, 1, 1),
    ("<think></think><answer></answer>", 1, 1),
    ("<think>a\nb</think>\n\n <answer>2\n</answer>", 1, 1),
    ("<think>a\r\n</think>\r\n<answer>2</answer>", 1, 1),
    (WHOLE + "\n", 1, 1),
    (WHOLE + "\r\n", 0, 0),
    (WHOLE + "\n\n", 0, 0),
    (WHOLE + " ", 0, 0),
    (" " + WHOLE, 0, 0),
    ("\n" + WHOLE, 0, 0),
    (WHOLE + " so there", 0, 0),
    ("so: " + WHOLE, 0, 0),
    ("<think>1+1</think>: <answer>2</answer>", 0, 0),
    ("<answer>2</answer>", 0, 0),
    ("<think>1+1</think>", 0, 0),
    ("<think>1+1<answer>2</answer>", 0, 0),
    ("<think>1+1</think><answer>2", 0, 0),
    ("<answer>2</answer><think>1+1</think>", 0, 0),
    ("<THINK>1</THINK><ANSWER>2</ANSWER>", 0, 0),
    ("", 0, 0),
    # The lazy pattern lets tags stand twice; `tags` does not.
    (WHOLE + WHOLE, 1, 0),
    ("<think><think>1</think><answer>2</answer>", 1, 0),
    ("<think>1</think></think><answer>2</answer>", 1, 0),
    ("<think>1</think><answer><answer>2</answer>", 1, 0),
    ("<think>1</think><answer>2</answer></answer>", 1, 0),
    ("<think><answer>1</answer></think><answer>2</answer>", 1, 0),
)


@pytest.mark.parametrize(("completion", "form", "tags"), TABLE)
def test_scores(completion: str, form: float, tags: float) -> None:
    sample = Sample(Problem("2"), completion)
    assert (format_reward(sample), tags_reward(sample)) == (form, tags)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=14))
def test_format_is_the_plain_pattern(pieces: list[str]) -> None:
    completion = "".join(pieces)
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    assert format_reward(Sample(Problem(""), completion)) == bool(re.match(pattern, completion, re.DOTALL))
