"""Columns of the numbers that runs have reported, and what batches are called."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ref_server.config import ServeConfig
from ref_server.queue.run_metrics import Point
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.views import columns, describe_rewards
from shared.batch import TokenGroup
from tests.ref_server.calls import Rollout

USER, ASSISTANT = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
DECODED = "…" + "a" * 189 + " user 2+3?"


def test_a_damaged_record_hides_no_other() -> None:
    points = [Point(step, 0.0, record) for step, record in enumerate(['{"a": 1}', '{"a', "[]", '{"a": 2}'])]
    assert columns(points, []) == {"a": [1, None, None, 2]}


class Worded(NoReferenceModel):
    """No model, but a letter for each id, and `#` for the special ones."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "".join("#" if id < 5 else chr(id) for id in ids if id >= 5 or not skip_special_tokens)


@pytest.mark.parametrize(
    ("sample", "prompt", "answer"),
    [
        ({"prompt": " 2 +\n3?", "answer": "5"}, "2 + 3?", "5"),
        ({"messages": [USER, {"role": "user", "content": "and 4?"}, ASSISTANT], "answer": 6}, "and 4?", "6"),
        ({"prompt": [USER], "answer": 0.5}, "2+3?", "0.5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}, {"text": "what?"}]}]}, "what?", None),
        ({"prompt": "y" * 300, "answer": "\u202e5" * 300}, "y" * 199 + "…", ("\u202e5" * 100)[:199] + "…"),
        ({"prompt": {}, "messages": [[], {"role": "user"}, 5], "answer": ["5"]}, DECODED, None),
        ({"prompt": [{"role": "user", "content": [5, {"text": {}}]}], "answer": True}, DECODED, None),
        ({"prompt": " ", "answer": ""}, DECODED, None),
        ({"prompt": [], "answer": {"a": "b"}}, DECODED, None),
        ("answer", DECODED, None),
        (None, DECODED, None),
    ],
)
def test_a_batch_is_named_by_its_problem(rollout: Rollout, sample: Any, prompt: str, answer: str | None) -> None:
    ids = np.array([1, *b"a" * 300, *b"\nuser 2+3?", 2])
    batch = rollout(group=TokenGroup(ids, ids[:1], np.array([1])), lengths=(1,), sample=json.dumps(sample))
    view = describe_rewards(batch, Worded(ServeConfig(no_model=True)))
    assert (view.prompt, view.answer) == (prompt, answer)


def test_a_server_without_texts_knows_the_samples_prompt_only(rollout: Rollout) -> None:
    nothing = NoReferenceModel(ServeConfig(no_model=True))
    assert describe_rewards(rollout(), nothing).prompt is None
    assert describe_rewards(rollout(sample='{"prompt": "2+3?"}'), nothing).prompt == "2+3?"
