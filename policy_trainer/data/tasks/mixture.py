"""A mixture of tasks: problems are drawn from each task in proportion to its weight."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.steps import Step, StepJudge, step_judge
from policy_trainer.data.tasks.problem_set import LazyProblems
from policy_trainer.rewards.answers import ByTask
from shared.errors import UserError


class Mixture:
    """An answer is judged by the task that its problem came from, and so are its steps if all tasks judge steps.

    All tasks share the same rewards, so completions need one form: the prefills of single tasks are left out.
    """

    name = "mixture"
    default_rewards = ("accuracy", "format")

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        self._labels = _labels([task.name for task in tasks])
        self._tasks = list(tasks)
        self.correct = ByTask({label: task.correct for label, task in zip(self._labels, tasks, strict=True)})
        judges = [step_judge(task) for task in tasks]
        self.steps: StepJudge | None = self._judge_steps if all(judges) else None
        self._schedule = Schedule(weights, seed)
        self._eval_order = _interleaved([len(task.eval_problems()) for task in tasks], weights)

    def problem(self, index: int) -> Problem:
        source, source_index = self._schedule.place(index)
        return self._labelled(source, self._tasks[source].problem(source_index))

    def eval_problems(self) -> Sequence[Problem]:
        """All held-out problems, interleaved by weight: any first n of them are mixed like the training problems."""
        sets = [task.eval_problems() for task in self._tasks]

        def make(place: int) -> Problem:
            source, source_place = self._eval_order[place]
            return self._labelled(source, sets[source][source_place])

        return LazyProblems(len(self._eval_order), make)

    def _judge_steps(self, problem: Problem, completion: str) -> Sequence[Step]:
        judge = step_judge(self._tasks[self._labels.index(problem.task)])
        assert judge is not None
        return judge(problem, completion)

    def _labelled(self, source: int, problem: Problem) -> Problem:
        return replace(problem, task=self._labels[source], assistant_prefill="")


def _labels(names: Sequence[str]) -> list[str]:
    """Labels for tasks of these names; the second task of the same name gets `name-2`."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]


def _interleaved(lengths: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """The (source, place) of all items of lists of these lengths, interleaved by weight until a list ends."""
    turns = (
        ((place + 0.5) / weight, source, place)
        for source, (length, weight) in enumerate(zip(lengths, weights, strict=True))
        for place in range(length)
    )
    return [(source, place) for _, source, place in sorted(turns)]


# Indexes in one round of a mixture, so weights have a resolution of 1/1000.
ROUND = 1000


class Schedule:
    """Assigns indexes to sources. Each round of 1,000 indexes has every source in proportion to its weight, shuffled.

    The k-th index of a source, counted from 0, is its index k: no problem is skipped or repeated, however indexes are
    divided among workers. A pure function of (seed, index).
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = _counts(weights)
        self._slots = np.repeat(np.arange(len(weights)), self.counts)
        self._seed = seed
        self._round, self._order = -1, self._slots

    def place(self, index: int) -> tuple[int, int]:
        """(source, index within the source)."""
        number, offset = divmod(index, ROUND)
        if number != self._round:  # only the last order is kept: indexes nearly always come in sequence
            self._order = np.random.default_rng((self._seed, number, ROUND)).permutation(self._slots)
            self._round = number
        source = int(self._order[offset])
        earlier = int(np.count_nonzero(self._order[:offset] == source))
        return source, number * self.counts[source] + earlier


def _counts(weights: Sequence[float]) -> list[int]:
    """How often each source occurs in a round: its share of the weights, rounded by the largest-remainder method."""
    shares = [weight / sum(weights) * ROUND for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: ROUND - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise UserError(f"data.mixture: a weight of {weights[counts.index(0)]:g} is less than one of {ROUND} problems")
    return counts
