"""After the first steps a run that cannot learn is reported, with the cause to fix first."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import LossConfig
from policy_trainer.reporting.first_steps import FirstSteps, last_of_first, unrewarded
from shared.batch import Batch

TAGS = frozenset({"accuracy", "format"})
LOSS = LossConfig()
NAN = math.nan
RIGHT, WRONG = "<think>6*7</think><answer>42</answer>", "<answer>41</answer>"


@pytest.fixture
def make_batch(make_scored: Any, tokenizer: Any) -> Callable[..., Batch]:
    """A group from texts."""

    def make(
        texts: Sequence[str],
        rewards: Sequence[float],
        *,
        prompt: str = "6*7=?",
        finished: bool = True,
        parts: dict[str, float] | None = None,
    ) -> Batch:
        rows = [tokenizer.encode(text) for text in texts]
        rollout = make_scored(tokenizer.encode(prompt), rows, rewards)
        each = np.ones(len(texts), np.float32)
        return replace(
            rollout,
            finished=np.full(len(texts), finished),
            reward_parts={name: each * value for name, value in (parts or {"accuracy": rewards[0]}).items()},
        )

    return make


def troubles(tokenizer: Any, *steps: list[Batch], tagged: frozenset[str] = TAGS, loss: LossConfig = LOSS) -> list[str]:
    first = FirstSteps(2, tokenizer, tagged, loss)
    return [str(trouble) for number, step in enumerate(steps, 1) for trouble in first.observe(number, step)]


def test_rewards_that_differ_are_no_trouble(tokenizer: Any, make_batch: Any) -> None:
    learns, alike = make_batch([RIGHT, WRONG], [1.0, 0.0]), make_batch([WRONG, WRONG], [0.0, 0.0])
    assert troubles(tokenizer, [alike, alike], [alike, learns]) == []
    assert troubles(tokenizer, [learns], [alike]) == []


def test_rewards_that_are_compared_apart_may_have_equal_sums(tokenizer: Any, make_batch: Any) -> None:
    batch = make_batch([RIGHT, WRONG], [1.0, 1.0])
    batch = replace(batch, reward_parts={"a": np.array([1, 0], np.float32), "b": np.array([0, 1], np.float32)})
    assert len(troubles(tokenizer, [batch], [batch])) == 1
    first = FirstSteps(2, tokenizer, TAGS, LOSS, apart={"a": 1.0, "b": 1.0})
    assert [*first.observe(1, [batch]), *first.observe(2, [batch])] == []


def test_rollouts_of_several_turns(tokenizer: Any, make_batch: Any) -> None:
    """What tools say is no answer, and the limit that ended most rollouts is named."""
    ends = {"out_of_turns": 2}
    totals = {"turns": 2, "seconds": 1.0, "slowest": 1.0, "ends": ends, "calls": [], "failures": {}}
    batch = make_batch(["so <answer>1</answer>", "<answer>2</answer>"], [0.0, 0.0], finished=False)
    mask = np.zeros(len(batch.group.completion_ids), np.bool_)
    mask[:2] = mask[-1] = True
    sample = json.dumps({"rollouts": {"tools": [], "totals": totals, "rollouts": []}})
    (trouble,) = troubles(tokenizer, *[[replace(batch, loss_mask=mask, sample=sample)]] * 2, tagged=frozenset())
    assert "raise --turns.max-tool-calling-iterations" in trouble
    (trouble,) = troubles(tokenizer, *[[replace(batch, loss_mask=mask, sample=sample)]] * 2)
    assert "look for <answer> tags" in trouble


PLAIN = {"texts": ["it is 42", "41"], "rewards": [0.0, 0.0]}
ASKING = {"prompt": "6*7=? in <answer> tags"}


@pytest.mark.parametrize(
    ("batch", "tagged", "words"),
    [
        (PLAIN, TAGS, ["accuracy look for <answer> tags", "--data.system-prompt", "One begins: 'it is 42'"]),
        ({**PLAIN, "finished": False}, TAGS, ["no prompt asks for", "--data.system-prompt"]),
        ({**PLAIN, **ASKING}, TAGS, ["the prompts ask for <answer> tags", "policy-trainer sft", "it is 42"]),
        ({**PLAIN, **ASKING, "finished": False}, TAGS, ["cut off", "--sampling.max-completion-length", "it is 42"]),
        ({**PLAIN, "rewards": [0.5, 0.0]}, TAGS, ["look for <answer> tags"]),
        ({**PLAIN, "finished": False}, frozenset(), ["all 4 completions were cut off"]),
        ({"texts": [WRONG, WRONG], "rewards": [0.0, 0.0]}, TAGS, ["all 4 completions are wrong", "answer-rule"]),
        ({"texts": [RIGHT, RIGHT], "rewards": [1.0, 1.0]}, TAGS, ["all 4 completions are right", "too easy"]),
        ({"texts": [RIGHT, RIGHT], "rewards": [0.5, 0.5]}, TAGS, ["have the same reward", "num-generations"]),
        ({**PLAIN, "rewards": [NAN, NAN]}, TAGS, ["none of the gold answers", "--data.answer-rule"]),
        (
            {**PLAIN, "rewards": [NAN, NAN], "parts": {"accuracy": 0.0, "mine:concise": NAN}},
            TAGS,
            ["mine:concise gave none of the 4 completions a number", "worker's log"],
        ),
    ],
)
def test_each_cause(batch: dict[str, Any], tagged: frozenset[str], words: list[str], tokenizer: Any, make_batch: Any):
    made = make_batch(**batch)
    (trouble,) = troubles(tokenizer, [made], [made], [made], tagged=tagged)
    assert trouble.startswith("the first steps teach little or nothing: ") and len(trouble) < 450
    for word in words:
        assert word in trouble


def test_a_resumed_run_is_not_checked_again(tokenizer: Any, make_batch: Any) -> None:
    first = FirstSteps(2, tokenizer, TAGS, LOSS)
    assert first.observe(7, [make_batch(**PLAIN)]) == []


@pytest.mark.parametrize(("groups", "steps", "last"), [(8, 100, 2), (64, 100, 2), (1, 100, 8), (3, 100, 3), (1, 1, 1)])
def test_it_waits_for_a_few_groups(groups: int, steps: int, last: int) -> None:
    assert last_of_first(groups, steps) == last


@pytest.mark.parametrize(("cut", "words"), [(3, "3 of 4 completions were cut off"), (2, "all 4 completions are wrong")])
def test_where_most_completions_are_cut_off_this_is_the_cause(
    cut: int, words: str, tokenizer: Any, make_batch: Any
) -> None:
    wrong = make_batch([WRONG] * 4, [0.0] * 4)
    (trouble,) = troubles(tokenizer, [], [replace(wrong, finished=np.arange(4) >= cut)])
    assert words in trouble


def test_with_a_teacher_only_unjudged_completions_are_reported(tokenizer: Any, make_batch: Any) -> None:
    loss = LossConfig(advantage="distill")
    alike, unjudged = make_batch([WRONG, WRONG], [0.0, 0.0]), make_batch([WRONG, WRONG], [NAN, NAN])
    assert troubles(tokenizer, [alike], [alike], loss=loss) == []
    assert len(troubles(tokenizer, [unjudged], [unjudged], loss=loss)) == 1


def test_answers_without_a_reward_are_shown_with_what_is_looked_for() -> None:
    answers = ["It is 5.", "x" * 500, "", "<answer>7</answer>"]
    text = unrewarded(answers, ["accuracy", "mine:reward"], {"accuracy"})
    assert "accuracy, mine:reward gave all 4 the same, 0 or less" in text
    assert "(accuracy looks for <answer> tags, which 1 of them have)" in text
    assert text.splitlines()[1:] == ["  'It is 5.'", f"  '{'x' * 160} …'", "  (empty)"]
    assert "tags" not in unrewarded(answers, ["mine:reward"], set())
