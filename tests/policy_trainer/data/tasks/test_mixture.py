"""A mixture keeps its weights, and each of its tasks keeps its order."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.config import DataConfig, MixtureSource, TrainConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.tasks.mixture import ROUND, Schedule
from policy_trainer.data.tasks.registry import make_task
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import DATA, write


def mixture(*sources: MixtureSource, seed: int = 0) -> Task:
    return make_task(TrainConfig(model="m", seed=seed, task="mixture", data=DataConfig(mixture=list(sources))))


def source(path: Path, name: str, count: int, weight: float = 1.0) -> MixtureSource:
    """Problems `name 0`, `name 1`, …, the first three of which are held out too."""
    records = [{"prompt": f"{name} {i}", "answer": name} for i in range(count)]
    eval_problems = write(path / f"{name}-held", *records[:3])
    return MixtureSource(task="jsonl", path=write(path / name, *records), eval_path=eval_problems, weight=weight)


class TestSchedule:
    @settings(deadline=None)
    @given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(0, 2**40), st.integers(0, 10**6))
    def test_a_round_has_each_source_by_its_weight_and_numbers_it_on(
        self, weights: list[float], seed: int, number: int
    ) -> None:
        schedule = Schedule(weights, seed)
        places = [schedule.place(number * ROUND + offset) for offset in range(ROUND)]
        for i, weight in enumerate(weights):
            drawn = [place for which, place in places if which == i]
            assert abs(len(drawn) - ROUND * weight / sum(weights)) < 1
            assert drawn == list(range(number * len(drawn), (number + 1) * len(drawn)))

    def test_a_weight_too_small_to_count_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"^data\.mixture: a weight of 0\.001 is less than one of 1000 problems"):
            Schedule([0.001, 10], 0)


class TestMixture:
    def test_no_problem_is_skipped_or_repeated_within_a_pass(self, tmp_path: Path) -> None:
        """Worker k of n takes the indexes that are k modulo n.

        Of 1,000 indexes 250 are for one task, of 50 problems, and 750 for the other, of 30: whole passes of both.
        """
        sources, workers = (source(tmp_path, "a", 50, weight=0.5), source(tmp_path, "b", 30, weight=1.5)), 3
        tasks = [mixture(*sources) for _ in range(workers)]
        drawn = Counter(tasks[k].problem(i).prompt for k in range(workers) for i in range(k, ROUND, workers))
        assert drawn == {**{f"a {i}": 5 for i in range(50)}, **{f"b {i}": 25 for i in range(30)}}

    def test_held_out_problems_are_mixed_by_weight_from_the_first_on(self, tmp_path: Path) -> None:
        eval_problems = mixture(source(tmp_path, "a", 9, weight=2.0), source(tmp_path, "b", 9)).eval_problems()
        assert [problem.prompt for problem in eval_problems] == ["a 0", "b 0", "a 1", "a 2", "b 1", "b 2"]
        assert [problem.prompt for problem in eval_problems[:2]] == ["a 0", "b 0"]

    def test_every_problem_is_judged_by_its_own_task(self) -> None:
        sources = [
            MixtureSource(task="countdown", path=DATA / "countdown.jsonl"),
            MixtureSource(task="gsm8k", path=DATA / "gsm8k.jsonl"),
            MixtureSource(task="arithmetic"),
        ]
        task = mixture(*sources)
        for problem in task.eval_problems()[:4]:
            answer = f"<answer>{solution(problem)}</answer>"
            assert task.correct(problem, answer) == 1 and task.correct(problem, "<answer>nothing</answer>") == 0
        assert task.default_rewards == ("accuracy", "format")

    def test_problems_name_their_task_and_leave_out_its_prefill(self) -> None:
        path = DATA / "countdown.jsonl"
        sources = [MixtureSource(task="countdown", path=path), MixtureSource(task="arithmetic")]
        task = mixture(*sources, sources[0])
        problems: Sequence[Problem] = [task.problem(i) for i in range(100)]
        assert {problem.task for problem in problems} == {"countdown", "arithmetic", "countdown-2"}
        assert {problem.assistant_prefill for problem in problems} == {""}
        assert {bool(problem.system_prompt) for problem in problems if problem.task != "arithmetic"} == {True}


def solution(problem: Problem) -> str:
    """24 of 4 and 6, 1 of 5 and 4; elsewhere the gold answer."""
    return {"24": "4*6", "1": "5-4"}[problem.answer] if problem.task == "countdown" else problem.answer
