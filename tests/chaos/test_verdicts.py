"""The judges of the chaos tests pass a correct record, and find exactly the fault of each changed one."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from uuid6 import uuid7

from policy_trainer.demo.base_model import make_model, make_tokenizer
from policy_trainer.weights.publication import version_directory
from shared.batch import RolloutBatch, TokenGroup
from shared.logprobs import PlainForward
from shared.models import save_model
from tests.chaos import clock, database, disk, engine, frozen, ranks, resume, trouble, weights


class TestWeights:
    def commit(self, root: Path, version: int) -> Path:
        directory = root / "run" / "first" / "0" / str(version)
        directory.mkdir(parents=True)
        (directory / ".manifest.json").touch()
        for file in ("config.json", "model.safetensors"):
            (directory / file).write_bytes(weights.content(version, file))
        return directory

    def test_whole_versions_pass(self, tmp_path: Path) -> None:
        for version in (1, 2):
            self.commit(tmp_path, version)
        assert weights.faults_on_disk(tmp_path) == []

    @pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
    def test_a_damaged_one_fails(self, tmp_path: Path, damage: Any) -> None:
        file = self.commit(tmp_path, 1) / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        assert len(weights.faults_on_disk(tmp_path)) == 1

    def test_files_of_two_versions_fail(self, tmp_path: Path) -> None:
        file = self.commit(tmp_path, 1) / "config.json"
        file.write_bytes(weights.content(2, "config.json"))
        assert len(weights.faults_on_disk(tmp_path)) == 1


class TestEngine:
    ARRIVED = (engine.Arrived(0, "1", 1e-6), engine.Arrived(1, "1", 0.0), engine.Arrived(2, "2", 1e-5))
    ENDING = engine.Ending("3", 2, "waiting for the vLLM server at … cannot load the weights")

    def test_whole_weights_and_all_problems_pass(self) -> None:
        assert engine.judge(self.ARRIVED, self.ENDING) == []

    @pytest.mark.parametrize(
        "arrived",
        [
            (*ARRIVED, ARRIVED[1]),
            (ARRIVED[0], ARRIVED[2]),
            (*ARRIVED[:2], replace(ARRIVED[2], difference=0.1)),
            (*ARRIVED[:2], replace(ARRIVED[2], difference=float("nan"))),
            (*ARRIVED[:2], replace(ARRIVED[2], version="3")),
        ],
    )
    def test_a_wrong_batch_fails(self, arrived: Any) -> None:
        assert len(engine.judge(arrived, self.ENDING)) == 1

    @pytest.mark.parametrize(
        "wrong", [{"status": 0}, {"said": "the vLLM server at"}, {"said": "cannot load the weights"}]
    )
    def test_a_wrong_ending_fails(self, wrong: dict[str, Any]) -> None:
        assert len(engine.judge(self.ARRIVED, replace(self.ENDING, **wrong))) == 1

    def test_a_batch_of_other_weights_is_found(self, tmp_path: Path) -> None:
        """What the largest difference is of: batches that are said to be of one version, and are of another."""
        tokenizer, group = make_tokenizer(), TokenGroup(np.array([3]), np.array([5, 6]), np.array([2]))
        for seed in (0, 1):
            save_model(make_model(seed), tokenizer, tmp_path / version_directory(0, seed))
        exact = PlainForward(make_model(0).eval())([group], [1.0]).detach().numpy()
        batch = RolloutBatch(
            id=str(uuid7()), run="r", epoch=0, policy_version=0, temperature=1.0, group=group,
            rewards=np.zeros(1, np.float32), finished=np.ones(1, np.bool_), sampler_logps=exact, sample='{"index": 7}',
        )  # fmt: skip
        mine, other, unknown = engine.compare(
            [batch, replace(batch, policy_version=1), replace(batch, policy_version=2)], tmp_path
        )
        assert mine.index == 7 and mine.difference < 1e-5 < 1e-2 < other.difference < unknown.difference


class TestResume:
    CALM = resume.Ending(trained=["a", "b"], weights={"w": "1", "v": "2"}, states={"done": 2})

    def test_the_same_ending_passes(self) -> None:
        shaken = replace(self.CALM, trained=["b", "a"])
        assert resume.compare(self.CALM, shaken, ["a", "b"]) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"trained": ["a"]},
            {"trained": ["a", "b", "b"]},
            {"trained": ["a", "c"]},
            {"weights": {"w": "1", "v": "3"}},
            {"weights": {"w": "1"}},
            {"states": {"done": 1, "ready": 1}},
            {"states": {"done": 1, "dead": 1}},
            {"ledger": ["a"]},
        ],
    )
    def test_another_ending_fails(self, wrong: dict[str, Any]) -> None:
        assert len(resume.compare(self.CALM, replace(self.CALM, **wrong), ["a", "b"])) == 1

    def test_equal_but_wrong_endings_fail(self) -> None:
        same = replace(self.CALM, trained=["a"], states={"done": 1})
        assert resume.compare(same, same, ["a", "b"]), "both lost the same batch"
        nothing = replace(self.CALM, weights={})
        assert resume.compare(nothing, nothing, ["a", "b"]), "no weights on either side"


class TestRanks:
    SUMMARY = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n"
    RANK = ranks.Kill("1", ranks=2, alone=False, seconds=3.0, words=SUMMARY)
    TORCHRUN = ranks.Kill(
        "torchrun", ranks=2, alone=False, seconds=1.0, words="torchrun has ended, so this rank ends, too"
    )

    def test_jobs_that_end_and_say_why_pass(self) -> None:
        assert ranks.judge([self.RANK, self.TORCHRUN], 2) == []
        assert ranks.judge([replace(self.TORCHRUN, alone=True, words="")], 1) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"seconds": 61.0},
            {"words": ""},
            {"words": SUMMARY.replace("-9", "1")},
            {"words": SUMMARY.replace("rank      : 1", "rank      : 0")},
        ],
    )
    def test_one_that_lives_on_or_does_not_say_who_died_fails(self, wrong: dict[str, Any]) -> None:
        assert len(ranks.judge([replace(self.RANK, **wrong)], 1)) == 1

    def test_orphans_must_say_why_they_end(self) -> None:
        assert len(ranks.judge([replace(self.TORCHRUN, words="")], 1)) == 1

    def test_too_few_kills_fail(self) -> None:
        assert len(ranks.judge([self.RANK], 2)) == 1

    def test_the_largest_difference_of_all_weights_counts(self, tmp_path: Path) -> None:
        for name, last in (("calm", 1.0), ("shaken", 1.5)):
            save_file({"a": torch.zeros(3), "b": torch.tensor([0.0, last])}, tmp_path / name)
        assert ranks.difference(tmp_path / "calm", tmp_path / "shaken") == 0.5


class TestFrozen:
    FREEZE = frozen.Freeze("a", stopped=True, elsewhere=True, told_sleeper="stale", told_holder="ok")

    def test_a_refused_sleeper_passes(self) -> None:
        freezes = [self.FREEZE, replace(self.FREEZE, id="b", elsewhere=False)]
        assert frozen.judge(freezes, {"a": 1, "b": 1}, 2) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"told_sleeper": "ok"},
            {"told_sleeper": "already"},
            {"told_sleeper": "unknown"},
            {"told_holder": "stale"},
            {"told_holder": "-"},
            {"stopped": False},
        ],
    )
    def test_a_wrong_freeze_fails(self, wrong: dict[str, Any]) -> None:
        assert len(frozen.judge([replace(self.FREEZE, **wrong)], {"a": 1}, 1)) == 1

    @pytest.mark.parametrize("settled", [{"a": 2}, {"a": 0}, {"a": 1, "b": 0}, {}])
    def test_a_wrong_history_fails(self, settled: dict[str, int]) -> None:
        assert len(frozen.judge([self.FREEZE], settled, 1)) == 1

    def test_too_few_freezes_fail(self) -> None:
        assert len(frozen.judge([self.FREEZE], {"a": 1}, 2)) == 1

    def test_a_batch_that_comes_again_after_it_was_settled_fails(self) -> None:
        assert len(frozen.judge([self.FREEZE, self.FREEZE], {"a": 1}, 2)) == 1


class TestTrouble:
    RIGHT = trouble.Trouble(
        admitted=["a", "b", "c"], refused=["c"], answers=[("upload", 507), ("ack", 200), ("lease", 204)],
        reason="the disk is full", acked=["a"], known={"a": "done", "b": "done", "c": "done"}, again=[201], alive=True,
    )  # fmt: skip

    def test_a_kept_promise_passes(self) -> None:
        assert trouble.judge(self.RIGHT, (507, 503), "disk is full") == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"answers": [("upload", 500)]},
            {"answers": [("lease", 429)]},
            {"refused": [], "again": []},
            {"reason": "the scoring loop has ended"},
            {"reason": ""},
            {"known": {"a": "done", "c": "done"}},
            {"known": {"a": "done", "b": "ready", "c": "done"}},
            {"known": {"a": "done", "b": "dead", "c": "done"}},
            {"admitted": ["b", "c"], "known": {"a": "leased", "b": "done", "c": "done"}},
            {"again": [507]},
            {"again": [200]},
            {"again": []},
            {"alive": False},
        ],
    )
    def test_a_broken_promise_fails(self, wrong: dict[str, Any]) -> None:
        assert len(trouble.judge(replace(self.RIGHT, **wrong), (507, 503), "disk is full")) == 1

    def test_a_status_that_is_not_allowed_fails(self) -> None:
        assert len(trouble.judge(self.RIGHT, (503,), "disk is full")) == 1

    def test_the_message_of_a_failed_start_names_the_reason(self) -> None:
        assert disk.judge_message("[error] the queue cannot be opened: the disk is full", "disk is full") == []
        assert disk.judge_message("[error] the queue cannot be opened", "disk is full")
        assert disk.judge_message("Traceback (most recent call last):\nStorageFull: the disk is full", "disk is full")
        assert disk.judge_message("", "disk is full")


class TestClock:
    MOVE = clock.Move(asked=86_400, seen=86_399, kept=["ok"] * 3, came_back=1.9, others=0)

    def test_unaffected_leases_pass(self) -> None:
        assert clock.judge([self.MOVE] * 2, Counter(done=6)) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"seen": 0},
            {"kept": ["stale", "ok", "ok"]},
            {"kept": ["ok", "ok", "unknown"]},
            {"kept": []},
            {"came_back": None},
            {"came_back": 0.4},
            {"came_back": 60.0},
            {"others": 1},
        ],
    )
    def test_an_affected_lease_fails(self, wrong: dict[str, Any]) -> None:
        assert len(clock.judge([replace(self.MOVE, **wrong)], Counter(done=3))) == 1

    @pytest.mark.parametrize("states", [{"done": 2}, {"done": 2, "expired": 1}, {"done": 3, "dead": 1}])
    def test_a_batch_that_is_lost_fails(self, states: dict[str, int]) -> None:
        assert len(clock.judge([self.MOVE], Counter(states))) == 1

    def test_a_clock_that_was_never_moved_fails(self) -> None:
        assert clock.judge([], Counter())


class TestDatabase:
    LOAD = database.Load(
        admitted=["a", "b"], acks=[("a", "1", "ok"), ("b", "2", "stale"), ("b", "3", "already")], outages=["away"]
    )
    AFTERMATH = database.Aftermath(done={"a": 1, "b": 1}, states={"done": 2}, went_on=[0.5, 1.0], same_process=True)

    def test_a_kept_promise_passes(self) -> None:
        assert database.judge(self.LOAD, self.AFTERMATH, 2) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"admitted": ["a", "b", "c"]},
            {"acks": [("a", "1", "ok"), ("b", "2", "ok"), ("b", "3", "ok")]},
            {"acks": [("a", "1", "ok"), ("c", "2", "ok")]},
            {"acks": []},
            {"outages": []},
        ],
    )
    def test_wrong_answers_to_clients_fail(self, wrong: dict[str, Any]) -> None:
        assert len(database.judge(replace(self.LOAD, **wrong), self.AFTERMATH, 2)) == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"done": {"a": 1, "b": 2}},
            {"states": {"done": 1, "scoring": 1}},
            {"states": {"done": 1, "leased": 1}},
            {"went_on": [0.5]},
            {"same_process": False},
        ],
    )
    def test_a_wrong_end_fails(self, wrong: dict[str, Any]) -> None:
        assert len(database.judge(self.LOAD, replace(self.AFTERMATH, **wrong), 2)) == 1

    def test_a_lost_batch_fails(self) -> None:
        aftermath = replace(self.AFTERMATH, done={"a": 1, "b": 0})
        assert len(database.judge(self.LOAD, aftermath, 2)) == 2, "one fault as admitted, one as acked"
