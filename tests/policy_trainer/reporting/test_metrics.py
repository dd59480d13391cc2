"""Metrics: one line a step, whatever crashes; the metrics of batches against numbers computed by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.metrics import MetricsFile, batch_metrics, next_index, read_metrics, truncate_metrics
from shared.batch import StepRewards
from shared.client import Leased


def write(path: Path, *records: dict[str, Any]) -> None:
    metrics = MetricsFile(path)
    for record in records:
        metrics.write(record)
    metrics.close()


class TestFile:
    def test_nan_and_infinity_are_null_at_any_depth(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        write(path, {"step": 1, "loss": math.nan, "norm": math.inf, "rewards": {"a": -math.inf, "b": 1.0}, "of": None})

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        record = json.loads(path.read_text(), parse_constant=refuse)
        assert record == {"step": 1, "loss": None, "norm": None, "rewards": {"a": None, "b": 1.0}, "of": None}

    def test_each_record_is_flushed_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        metrics = MetricsFile(path)
        metrics.write({"step": 1})
        assert read_metrics(path) == [{"step": 1}]
        metrics.close()

    def test_a_full_disk_ends_the_run_with_the_file_and_a_remedy(self, tmp_path: Path, full_disk: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.symlink_to(full_disk)
        metrics = MetricsFile(path)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl cannot be written: .*No space left.*; once .*--resume"):
            metrics.write({"step": 1})
        metrics.close()

    def test_a_last_line_cut_anywhere_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        write(path, {"step": 1, "kind": "step"}, {"step": 22, "kind": "step"})
        whole = path.read_bytes()
        first = whole.index(b"\n") + 1
        for end in range(first, len(whole) - 1):
            path.write_bytes(whole[:end])
            assert read_metrics(path) == [{"step": 1, "kind": "step"}]

    def test_truncation_drops_later_records_and_a_cut_line(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        write(path, {"step": 1}, {"step": 2, "kind": "evaluation"}, {"step": 2}, {"step": 3})
        path.write_text(path.read_text() + '5\nnull\n["step"]\n{"step": 4, "lo')
        truncate_metrics(path, 2)
        kept = [{"step": 1}, {"step": 2, "kind": "evaluation"}, {"step": 2}]
        assert read_metrics(path) == kept
        write(path, {"step": 3, "name": "é"})
        assert read_metrics(path) == [*kept, {"step": 3, "name": "é"}]
        truncate_metrics(path, 0)
        assert read_metrics(path) == [], "a run resumed at step 0 evaluates again"

    def test_texts_may_hold_what_unicode_calls_a_line_end(self, tmp_path: Path) -> None:
        path = tmp_path / "samples.jsonl"
        records = [{"step": step, "text": f"a{end}b"} for step, end in enumerate("\u2028\u2029\x85\x0b\x0c\x1c", 1)]
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        truncate_metrics(path, 4)
        assert read_metrics(path) == records[:4]

    def test_a_crash_while_truncating_loses_nothing_that_stays(self, tmp_path: Path, fuse: Any) -> None:
        path = tmp_path / "metrics.jsonl"
        for number in range(1, 20):
            path.unlink(missing_ok=True)
            write(path, {"step": 1}, {"step": 2})
            survived = fuse.lives(number, lambda: truncate_metrics(path, 1))
            assert read_metrics(path)[0] == {"step": 1}
            if survived:
                assert number > 2 and read_metrics(path) == [{"step": 1}]
                break


@pytest.fixture
def leased(make_scored: Any) -> list[Leased]:
    """Two groups: four judged rewards of five, lengths 1, 2, 3 and 4, 2; versions 3 and 5."""

    def group(
        number: int, lengths: list[int], rewards: list[float], parts: dict[str, list[float]], **given: Any
    ) -> Leased:
        batch = make_scored([3], [[4] * length for length in lengths], rewards, number=number, version=given["version"])
        scored = replace(
            batch,
            reward_parts={name: np.array(part, np.float32) for name, part in parts.items()},
            finished=np.array(given["finished"]),
            index=given["index"],
            sample=json.dumps(given["sample"]),
            reference_version=given["reference"],
        )
        return Leased(scored, scored.id, "token", given["deliveries"])

    first = {"sampling_seconds": 0.5, "waiting_seconds": 0.25, "dropped_prompts": 2}
    first |= {"resampled_groups": 2, "resampled_tokens": 30}
    second = {"sampling_seconds": 1.5, "judging_seconds": 0.5, "resampled_groups": 1, "resampled_tokens": 5}
    second |= {"probe_logp_difference": 0.25, "probe_logp_difference_max": 0.5}
    return [
        group(
            0, [1, 2, 3], [0.0, 2.0, math.nan], {"accuracy": [0, 1, math.nan], "tags": [0, 1, 1]},
            version=3, reference="12", deliveries=1, finished=[True, False, True], index=7, sample=first,
        ),
        group(
            1, [4, 2], [1.0, 1.0], {"accuracy": [1, 1]},
            version=5, reference="3", deliveries=3, finished=[True, True], index=4, sample=second,
        ),
    ]  # fmt: skip


class TestBatchMetrics:
    def test_by_hand(self, leased: list[Leased]) -> None:
        metrics = batch_metrics(leased, version=6)
        assert metrics == {
            "reward": 1.0,
            "reward/accuracy": 0.75,
            "reward/tags": pytest.approx(2 / 3),
            "reward_std": pytest.approx(math.sqrt(2 / 4)),
            "reward_std/accuracy": pytest.approx(math.sqrt(3) / 4),
            "reward_std/tags": pytest.approx(math.sqrt(2) / 3),
            "unrewarded": 1,
            "unrewarded/accuracy": 1,
            "unrewarded/tags": 0,
            "completions": 5,
            "completion_length_mean": pytest.approx(12 / 5),
            "completion_length_min": 1,
            "completion_length_max": 4,
            "truncated": pytest.approx(1 / 5),
            "sampling_seconds": 2.0,
            "judging_seconds": 0.5,
            "sampler_waiting_seconds": 0.25,
            "sampler_waiting_share": pytest.approx(1 / 9),
            "sampler_tokens_per_second": pytest.approx((12 + 30 + 5) / 2),
            "dropped_prompts": 2,
            "resampled_groups": 3,
            "resampled_tokens": 35,
            "probe_logp_difference": 0.25,
            "probe_logp_difference_max": 0.5,
            "staleness": 2.0,
            "staleness_max": 3,
            "reference_version_min": 3,
            "reference_version_max": 12,
            "redelivered": 1,
            "problems": [7, 4],
            "finished_length_mean": 2.5,
            "finished_length_min": 1,
            "finished_length_max": 4,
            "prompt_length_mean": 1.0,
        }
        assert next_index(leased) == 8

    def test_a_step_without_a_reward_leaves_its_completion_without_one(self, make_scored: Any) -> None:
        rollout = make_scored([1], [[2, 3], [4]], [1.0, 0.5])
        steps = StepRewards(
            rewards=np.array([0.0, math.nan, 1.0], np.float32), ends=np.array([0, 1, 0]), counts=np.array([2, 1])
        )
        metrics = batch_metrics([Leased(replace(rollout, steps=steps), rollout.id, "token", 1)], version=0)
        assert (metrics["unrewarded"], metrics["reward"]) == (1, 0.5)

    @pytest.mark.parametrize(
        "sample",
        [
            *("5", "[1]", '"text"', "null", "{}", '{"index": "7", "sampling_seconds": null}'),
            *('{"index": 1e999, "judging_seconds": NaN}', '{"index": -5, "waiting_seconds": -1e999}'),
            f'{{"index": {10**4000}, "sampling_seconds": {10**4000}, "resampled_tokens": {10**4000}}}',
        ],
    )
    def test_the_sample_of_an_outside_client_may_be_any_json(self, make_scored: Any, sample: str) -> None:
        """API.md: free for the client."""
        batch = make_scored([3], [[4], [5]], [0.0, 1.0])
        batch = replace(batch, sample=sample)
        leased = [Leased(batch, batch.id, "token", 1)]
        assert batch_metrics(leased, version=0)["problems"] == [None] and next_index(leased) == 0
