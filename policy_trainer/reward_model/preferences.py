"""Pairs of a better and a worse answer, in TRL's preference form, from a file or dataset, as texts and as token ids."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from policy_trainer.config.supervised import PairsConfig, RewardTrainingConfig
from policy_trainer.data.problem import Message, Problem, Sample
from policy_trainer.data.rows import Row, Rows, messages_of, read_dataset, read_file, text_of
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised import RowSet, every_tenth
from policy_trainer.tasks.problem_set import user_message
from shared.batch import Array
from shared.errors import UserError

_COLUMNS = ("prompt", "chosen", "rejected", "margin")
_FORMS = (
    '{"prompt": …, "chosen": …, "rejected": …}, texts or lists of messages, '
    'or {"chosen": […], "rejected": […]} of whole conversations'
)


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer. margin: by how much their scores shall differ at least. where: file and line."""

    chosen: Sample
    rejected: Sample
    margin: float
    where: str

    @property
    def asked(self) -> str:
        """What both answer; the better text where it is not known which part of it was asked."""
        problem = self.chosen.problem
        return str(problem) if problem.messages else self.chosen.completion


def read_preferences(data: PairsConfig, note: Callable[[str], None]) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on, and held-out ones. Without held-out data of its own no prompt is in both.

    Raises UserError with file and line for a row that is not a pair.
    """
    source = f"data.path: {data.path}" if data.path else f"data.dataset: {data.dataset}"
    found = _preferences(_read(data), source)
    held_out = _read_held_out(data)
    if held_out is None:
        return every_tenth(found, lambda preference: preference.asked, source, note)
    return found, _preferences(held_out, "the held-out data")


def _read(data: PairsConfig) -> Rows:
    if data.path:
        return read_file(data.path, _COLUMNS, "data.path")
    assert data.dataset, "the configuration refuses data without a source"
    return read_dataset(data.dataset, data.subset, data.split, _COLUMNS)


def _read_held_out(data: PairsConfig) -> Rows | None:
    if data.eval_path:
        return read_file(data.eval_path, _COLUMNS, "data.eval_path")
    if data.eval_split and data.dataset and not data.path:
        return read_dataset(data.dataset, data.subset, data.eval_split, _COLUMNS)
    return None


def _preferences(rows: Rows, source: str) -> list[Preference]:
    if missing := [name for name in ("chosen", "rejected") if name not in rows.columns]:
        there = ", ".join(rows.columns) or "none"
        raise UserError(f"{source} has no column {' or '.join(missing)}; its columns: {there}. A row must be {_FORMS}")
    return [_preference(rows.row(number), rows.where(number)) for number in range(len(rows))]


def _preference(row: Row, where: str) -> Preference:
    chosen, rejected = (_sample(row, column, where) for column in ("chosen", "rejected"))
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float | None) or not math.isfinite(margin or 0):
        raise UserError(f"{where}: margin must be a finite number, got {margin!r}; leave it out for 0")
    return Preference(chosen, rejected, float(margin or 0), where)


def _sample(row: Row, column: str, where: str) -> Sample:
    """Prompt and answer of a column: a text, the messages that follow the prompt, or a whole conversation."""
    if isinstance(row.get(column), list):
        return _of_messages(messages_of(row, column, where), row, column, where)
    if not isinstance(row.get(column), str):
        raise UserError(f"{where}: {column} must be a text or a list of messages: {_FORMS}")
    text = row[column] and text_of(row, column, where)  # an empty one is left out later, and counted
    if row.get("prompt") is None:
        return Sample(Problem(answer=""), text)
    if isinstance(row["prompt"], list):
        return Sample(Problem(answer="", messages=messages_of(row, "prompt", where)), text)
    asked = text_of(row, "prompt", where)
    return Sample(Problem(answer="", messages=user_message(asked), prompt=asked), text)


def _of_messages(messages: tuple[Message, ...], row: Row, column: str, where: str) -> Sample:
    whole = (*_before(messages, row, where), *messages)
    if len(whole) < 2 or whole[-1]["role"] != "assistant":
        raise UserError(f"{where}: {column} must end with an assistant message that follows others: {_FORMS}")
    return Sample(Problem(answer="", messages=whole[:-1]), whole[-1]["content"])


def _before(messages: tuple[Message, ...], row: Row, where: str) -> tuple[Message, ...]:
    """The prompt's messages. Some datasets have its text beside conversations that begin with it."""
    if row.get("prompt") is None:
        return ()
    if isinstance(row["prompt"], list):
        return messages_of(row, "prompt", where)
    return user_message(text_of(row, "prompt", where)) if messages[0]["role"] == "assistant" else ()


@dataclass(frozen=True, eq=False)
class Pair:
    """int32 token ids of the better and the worse text, prompt and answer. margin: see Preference."""

    chosen: Array
    rejected: Array
    margin: float = 0.0

    @property
    def longest(self) -> int:
        return max(len(self.chosen), len(self.rejected))


def load_pairs(config: RewardTrainingConfig, classifier: TextClassifier, note: Callable[[str], None]) -> RowSet[Pair]:
    """Reads and encodes the pairs, and calls `note` with a summary. Raises UserError for unusable data."""
    encoder = PairEncoder(classifier, _TOO_LONG[config.data.too_long])
    train, held_back = (encoder.encode_all(found) for found in read_preferences(config.data, note))
    tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in train)
    note(f"pairs: {len(train)} to train on, of {tokens} tokens; {len(held_back)} held out{encoder.told()}")
    if not train or not held_back:
        which = "held-out pair" if train else "pair"
        raise UserError(f"data: no {which} is left{encoder.told()}: add pairs whose texts differ, or raise max_length")
    return RowSet(train, held_back, epochs=config.num_train_epochs, batch_size=config.batch_size, seed=config.seed)


class PairEncoder:
    """Encodes pairs as the reward model will score them, and counts those from which nothing can be learnt."""

    def __init__(self, classifier: TextClassifier, too_long: "Callable[[Pair, int, str], _Outcome]") -> None:
        self._classifier = classifier
        self._too_long = too_long
        self._counts: Counter[str] = Counter()

    def encode_all(self, preferences: Iterable[Preference]) -> list[Pair]:
        """Raises UserError, with file and line, for messages that the chat template refuses, and for too_long."""
        return [pair for preference in preferences if (pair := self._encode(preference)) is not None]

    def told(self) -> str:
        """What was left out or cut, in words."""
        return "".join(f"; {count} {why}" for why, count in self._counts.items())

    def _encode(self, preference: Preference) -> Pair | None:
        pair, why = self._outcome(preference)
        self._counts.update([why] if why else [])
        return pair

    def _outcome(self, preference: Preference) -> "_Outcome":
        if not (preference.chosen.completion and preference.rejected.completion):
            return None, "left out, of which an answer is empty"
        try:
            sides = [self._classifier.encode(sample) for sample in (preference.chosen, preference.rejected)]
        except UserError as error:
            raise UserError(f"{preference.where}: {error}") from error
        chosen, rejected = (np.array(ids, np.int32) for ids in sides)
        pair = Pair(chosen, rejected, preference.margin)
        why = ""
        if pair.longest > self._classifier.limit:
            pair, why = self._too_long(pair, self._classifier.limit, preference.where)
        if pair is not None and np.array_equal(pair.chosen, pair.rejected):
            return None, "left out, whose texts are equal"
        return pair, why


# A pair, None where it is left out; and what happened to it, empty where nothing did.
_Outcome = tuple[Pair | None, str]


def _truncate(pair: Pair, limit: int, where: str) -> _Outcome:
    return Pair(pair.chosen[-limit:], pair.rejected[-limit:], pair.margin), f"cut to their last {limit} tokens"


def _drop(pair: Pair, limit: int, where: str) -> _Outcome:
    return None, f"dropped, with more than {limit} tokens"


def _refuse(pair: Pair, limit: int, where: str) -> _Outcome:
    raise UserError(
        f"{where}: has a text of {pair.longest} tokens, and it may have {limit}: max_length, or the model's context"
    )


_TOO_LONG: dict[str, Callable[[Pair, int, str], _Outcome]] = {"truncate": _truncate, "drop": _drop, "refuse": _refuse}
