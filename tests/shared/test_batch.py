"""The invariants of the two messages, checked where a batch is built."""

import math
from typing import Any

import numpy as np
import pytest

from shared.batch import MAX_SAMPLE_BYTES, Batch, BatchError, StepRewards, TokenGroup
from shared.sampling_mask import SamplingMask

ID = "01890a5d-ac96-774b-bcce-b302099a8057"


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def rollout(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "id": ID,
        "run": "run",
        "epoch": 0,
        "policy_version": 3,
        "temperature": 0.9,
        "group": TokenGroup(i64(5, 6), i64(1, 2, 3, 4, 5), i64(2, 3)),
        "rewards": f32(1, math.nan),
        "finished": np.array([True, False]),
    }
    return Batch(**{**fields, **changes})


def steps(rewards: Any = None, ends: Any = None, counts: Any = None) -> StepRewards:
    return StepRewards(
        rewards=f32(1, math.nan, 0.5) if rewards is None else rewards,
        ends=i64(1, 0, 2) if ends is None else ends,
        counts=i64(1, 2) if counts is None else counts,
    )


def test_group_tells_its_sizes() -> None:
    group = TokenGroup(i64(9, 9, 9), i64(1, 2, 3, 4, 5, 6), i64(1, 3, 2))
    assert (group.size, group.tokens, group.longest_row) == (3, 9, 6)
    assert [row.tolist() for row in group.completions()] == [[1], [2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_versions": i64(3, 2**63 - 1)},
        {"steps": steps(f32(), i64(), i64(0, 0))},
        {"top_p": 1.0, "top_k": 0, "task": "gsm8k", "sample": "null"},
        {"sample": '"\\ud83d\\ude00 \\u0000"'},
        {"sample": '"' + "x" * (MAX_SAMPLE_BYTES - 2) + '"'},
        {"run": "länger 🦜", "epoch": 2**63 - 1},
        {"temperature": 1e-3},
        {"temperature": 1e3},
        {"rewards": f32(1e6, -1e6)},
        {"sampler_logps": f32(-1, -2, -3, -4, 1e-4)},  # rounding
    ],
)
def test_accepts(changes: dict[str, Any]) -> None:
    rollout(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rewards": f32(1, 3e38)}, "rewards"),
        ({"rewards": f32(-1.1e6, math.nan)}, "rewards"),
        ({"policy_versions": i64(2, 3)}, "policy_versions"),
        ({"reward_parts": {"a": f32(1, -3e38)}}, "reward/a"),
        ({"reward_parts": {"x" * 201: f32(1, 2)}}, "reward/" + "x" * 201),
        ({"steps": steps(f32(1, 3e38, 0))}, "step_rewards"),
        ({"steps": steps(ends=i64(1, 2, 2))}, "step_ends"),  # does not rise
        # Every difference of these overflows to something positive.
        ({"steps": steps(f32(0, 0, 0, 0), i64(0, 2**63 - 1, -2, 2), i64(0, 4))}, "step_ends"),
        ({"id": ID.replace("-", "")}, "id"),
        ({"id": f"{ID}\n"}, "id"),
        ({"id": "00000000-0000-0000-0000-000000000000"}, "id"),
        ({"run": "x" * 201}, "run"),
        ({"run": "a\nb"}, "run"),
        ({"run": "\ud800"}, "run"),
        ({"policy_version": 2**63}, "policy_version"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"sample": "[" * 10_000}, "sample"),
        ({"sample": "[" * 400 + "]" * 400}, "sample"),  # its reader may be deep in calls
        ({"sample": '"\ud800"'}, "sample"),
        ({"sample": '"\\ud800"'}, "sample"),
        ({"sample": '{"answer": ["a", {"\\udfff\\ud800": 1}]}'}, "sample"),
        ({"sample": '"' + "ä" * (MAX_SAMPLE_BYTES // 2) + '"'}, "sample"),  # bytes, not characters
    ],
)
def test_refuses(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BatchError) as caught:
        rollout(**changes)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_a_divided_group_has_the_masks_of_its_completions() -> None:
    kept = [[1, 8], [], [3], [9, 4], [5, 6]]
    mask = SamplingMask.of([np.array(ids, np.int32) for ids in kept])
    group = TokenGroup(i64(7), i64(1, 2, 3, 4, 5), i64(2, 1, 2), sampling_mask=mask)
    parts = [mask for part in group.divided(3) if (mask := part.sampling_mask) is not None]
    assert [(part.token_ids.tolist(), part.counts.tolist()) for part in parts] == [
        ([1, 8], [2, 0]), ([3], [1]), ([9, 4, 5, 6], [2, 2])
    ]  # fmt: skip
    with_another = SamplingMask.join([None, parts[0], None], [1, 2, 1])
    assert with_another is not None
    assert (with_another.token_ids.tolist(), with_another.counts.tolist()) == ([1, 8], [0, 2, 0, 0])
    assert SamplingMask.join([None, None], [1, 2]) is None


@pytest.mark.parametrize("bad", [-1, 8])
def test_kept_tokens_lie_in_the_vocabulary(bad: int) -> None:
    mask = SamplingMask.of([np.array([bad, 1], np.int32)])
    with pytest.raises(BatchError, match="sampling_mask_ids must lie in"):
        TokenGroup(i64(7), i64(1), i64(1), sampling_mask=mask).check_ids(8, "the vocabulary")


def test_batches_do_not_change() -> None:
    parts = {"a": f32(1, 2)}
    batch = rollout(reward_parts=parts)
    parts["b"] = f32(1)
    assert list(batch.reward_parts) == ["a"]
    with pytest.raises(TypeError):
        batch.reward_parts["b"] = f32(1)  # type: ignore[index]
