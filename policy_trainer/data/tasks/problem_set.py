"""Tasks whose problems are the rows of a file or of a dataset, passed over again and again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from textwrap import shorten
from typing import overload

import numpy as np

from policy_trainer.config import SourceConfig
from policy_trainer.data.pictures import PICTURE_COLUMNS, with_pictures
from policy_trainer.data.problem import Correct, Message, Problem
from policy_trainer.data.rows import Others, Row, Rows, read_dataset, read_file
from shared.errors import UserError
from shared.spelling import spell_setting

# Asks for the form that the rewards `format` and `tags` check.
THINK_THEN_ANSWER = (
    "You are a helpful assistant. You first think about how to solve the user's question, and then give the answer. "
    "Put your reasoning between <think> and </think>, and after it the answer alone between <answer> and </answer>: "
    "<think>your reasoning</think><answer>your answer</answer>."
)
DEFAULT_REWARDS = ("accuracy", "format")
# If a source names no held-out problems, every tenth problem is held out.
EVAL_EVERY = 10

# The columns that a source must have. Each element lists alternatives, of which one is enough.
Wanted = Sequence[Sequence[str]]
# (row, its place) -> its problem. Raises UserError, naming the place, for a row that cannot be used.
Parse = Callable[[Row, str], Problem]
# Problems to train on, and held-out ones.
Split = tuple[Sequence[Problem], Sequence[Problem]]


class LazyProblems(Sequence[Problem]):
    """A sequence of `length` problems, made by `make(place)` on access, so that they need not fit into memory."""

    def __init__(self, length: int, make: Callable[[int], Problem]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Problem: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Problem]: ...

    def __getitem__(self, place: int | slice) -> Problem | Sequence[Problem]:
        places = range(self._length)[place]  # resolves negative places and slices, raises IndexError
        return self._make(places) if isinstance(places, int) else [self._make(number) for number in places]


class Shuffle:
    """Endless passes over `size` places, each pass shuffled anew; a pure function of (seed, index). seed: None for
    passes in order."""

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self._seed = seed
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def place(self, index: int) -> int:
        number, offset = divmod(index, self._size)
        if self._seed is None:
            return offset
        if number != self._pass:  # only the last order is kept: indexes nearly always come in sequence
            self._order = np.random.default_rng((self._seed, number)).permutation(self._size)
            self._pass = number
        return int(self._order[offset])


class ProblemSet:
    """A task over a fixed set of problems: training makes endless passes over them.

    shuffle: whether each pass is shuffled anew; else it has the order of the problems.
    """

    def __init__(
        self,
        name: str,
        split: Split,
        correct: Correct,
        seed: int,
        default_rewards: tuple[str, ...] = DEFAULT_REWARDS,
        *,
        shuffle: bool = True,
    ) -> None:
        self.name = name
        self.correct = correct
        self.default_rewards = default_rewards
        self.training_problems = len(split[0])
        self._train, self._eval_problems = split
        self._shuffle = Shuffle(len(self._train), seed if shuffle else None)

    def problem(self, index: int) -> Problem:
        return self._train[self._shuffle.place(index)]

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval_problems


def default_to_hub(
    source: SourceConfig, dataset: str, subset: str | None, eval_split: str | None = None
) -> SourceConfig:
    """The source, with this dataset of the Hub if it names neither a file nor a dataset."""
    if source.path or source.dataset:
        return source
    split = source.eval_split or eval_split
    defaults = {"dataset": dataset, "subset": source.subset or subset, "eval_split": split}
    return source.model_copy(update=defaults)


def read_split(
    source: SourceConfig, parse: Parse, wanted: Wanted, others: Others = "ignored", *, pictures: bool = False
) -> Split:
    """The problems of a source. Every row is parsed once here, so that a malformed row cannot stop a run later.

    parse: gets the wanted columns of a row, or all where others are kept. pictures: whether problems get the pictures
    of their rows.

    Raises UserError for a source or a row that cannot be used.
    """
    columns = [*chain(*wanted), *(PICTURE_COLUMNS if pictures else ())]
    if source.path:
        rows = read_file(source.path, columns, "data.path", others)
        where = f"data.path: {source.path}"
    else:
        assert source.dataset, "the configuration refuses a task without a source"
        rows = read_dataset(source.dataset, source.subset, source.split, columns, others)
        where = f"data.dataset: {source.dataset}, split {source.split},"
    problems = _problems(_complete(rows, wanted, where), parse, pictures)
    if source.eval_path:
        held_out = read_file(source.eval_path, columns, "data.eval_path", others)
        where = f"data.eval_path: {source.eval_path}"
    elif source.eval_split and source.dataset and not source.path:
        held_out = read_dataset(source.dataset, source.subset, source.eval_split, columns, others)
        where = f"data.dataset: {source.dataset}, split {source.eval_split},"
    else:
        return _every_tenth(problems, source)
    eval_problems = _problems(_complete(held_out, wanted, where), parse, pictures)
    for _ in chain(problems, eval_problems):  # raises for the first row that cannot be used
        pass
    return problems, eval_problems


def _every_tenth(problems: Sequence[Problem], source: SourceConfig) -> Split:
    eval_places = range(0, len(problems), EVAL_EVERY)
    held_out = {_question(problems[place]) for place in eval_places}
    # Copies of a held-out problem must not be trained on. This also parses every row, and so checks it.
    train = [
        place
        for place, problem in enumerate(problems)
        if place not in eval_places and _question(problem) not in held_out
    ]
    if not train:
        where = f"data.path: {source.path}" if source.path else f"data.dataset: {source.dataset}"
        raise UserError(
            f"{where} leaves no problem to train on: one of every {EVAL_EVERY}, and each copy of it, is held out",
            f"add problems, or name held-out ones with {spell_setting('data.eval_path')}",
        )
    return (
        LazyProblems(len(train), lambda place: problems[train[place]]),
        LazyProblems(len(eval_places), lambda place: problems[eval_places[place]]),
    )


def _complete(rows: Rows, wanted: Wanted, where: str) -> Rows:
    """The rows. Raises UserError if a wanted column is missing."""
    for names in wanted:
        if not set(names) & set(rows.columns):
            there = shorten(", ".join(rows.columns), 300) or "none"
            raise UserError(
                f"{where} has no column {' or '.join(names)}; its columns: {there}. For tasks dataset and jsonl, set "
                "data.columns.prompt and data.columns.answer to its names; without answers choose "
                f"{spell_setting('rewards')} that need none"
            )
    return rows


def _problems(rows: Rows, parse: Parse, pictures: bool) -> Sequence[Problem]:
    def make(place: int) -> Problem:
        row, where = rows.row(place), rows.where(place)
        problem = replace(parse(row, where), where=where)
        return with_pictures(problem, row, where, rows.folder) if pictures else problem

    return LazyProblems(len(rows), make)


def _question(problem: Problem) -> tuple[str | bytes, ...]:
    """What makes two problems the same. Questions in words are often the same for many pictures."""
    pictures = (sha256(image).digest() for image in problem.images)
    return (problem.prompt, *(repr(sorted(message.items())) for message in problem.messages), *pictures)


def user_message(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)
