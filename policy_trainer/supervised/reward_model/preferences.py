"""Pairs of a better and a worse answer, in TRL's preference form, from a file or dataset, as texts and as token ids."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from policy_trainer.config.supervised import PairsConfig, RewardTrainingConfig
from policy_trainer.data.messages import answer_of_messages, messages_of
from policy_trainer.data.problem import Message, Problem, Sample
from policy_trainer.data.rows import Row, Rows, read_dataset, read_file, text_of
from policy_trainer.data.tasks.problem_set import user_message
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised.training import RowSet, every_tenth
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
    def prompt(self) -> str:
        """What both answer; the whole better text if its prompt is not known."""
        problem = self.chosen.problem
        return str(problem) if problem.messages else self.chosen.completion


def read_preferences(data: PairsConfig, note: Callable[[str], None]) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on, and held-out ones. Without separate held-out data no prompt is in both.

    Raises UserError with file and line for a row that is not a pair.
    """
    if data.path:
        source, rows = f"data.path: {data.path}", read_file(data.path, _COLUMNS, "data.path")
    else:
        assert data.dataset, "the configuration refuses data without a source"
        source = f"data.dataset: {data.dataset}"
        rows = read_dataset(data.dataset, data.subset, data.split, _COLUMNS)
    preferences = _preferences(rows, source)
    if data.eval_path:
        held_out = read_file(data.eval_path, _COLUMNS, "data.eval_path")
    elif data.eval_split and data.dataset and not data.path:
        held_out = read_dataset(data.dataset, data.subset, data.eval_split, _COLUMNS)
    else:
        return every_tenth(preferences, lambda preference: preference.prompt, source, note)
    return preferences, _preferences(held_out, "the held-out data")


def _preferences(rows: Rows, source: str) -> list[Preference]:
    if missing := [name for name in ("chosen", "rejected") if name not in rows.columns]:
        there = ", ".join(rows.columns) or "none"
        raise UserError(f"{source} has no column {' or '.join(missing)}; its columns: {there}. A row must be {_FORMS}")
    preferences = []
    for number in range(len(rows)):
        row, where = rows.row(number), rows.where(number)
        chosen, rejected = (_sample(row, column, where) for column in ("chosen", "rejected"))
        margin = row.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float | None) or not math.isfinite(margin or 0):
            raise UserError(f"{where}: margin must be a finite number, got {margin!r}", "leave it out for 0")
        preferences.append(Preference(chosen, rejected, float(margin or 0), where))
    return preferences


def _sample(row: Row, column: str, where: str) -> Sample:
    """Prompt and answer of a column: a text, the messages that follow the prompt, or a whole conversation."""
    if isinstance(row.get(column), list):
        messages = messages_of(row, column, where)
        whole = (*_before(messages, row, where), *messages)
        if len(whole) < 2 or whole[-1]["role"] != "assistant":
            raise UserError(f"{where}: {column} must end with an assistant message that follows others: {_FORMS}")
        return Sample(Problem(answer="", messages=whole[:-1]), answer_of_messages(whole[-1], f"{where}: {column}"))
    if not isinstance(row.get(column), str):
        raise UserError(f"{where}: {column} must be a text or a list of messages: {_FORMS}")
    text = row[column] and text_of(row, column, where)  # an empty one is left out later, and counted
    if row.get("prompt") is None:
        return Sample(Problem(answer=""), text)
    if isinstance(row["prompt"], list):
        return Sample(Problem(answer="", messages=messages_of(row, "prompt", where)), text)
    prompt = text_of(row, "prompt", where)
    return Sample(Problem(answer="", messages=user_message(prompt), prompt=prompt), text)


def _before(messages: tuple[Message, ...], row: Row, where: str) -> tuple[Message, ...]:
    """The prompt's messages. Some datasets repeat its text in conversations that begin with it."""
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
    counts = Counter[str]()

    def encode_all(preferences: Iterable[Preference]) -> list[Pair]:
        pairs = []
        for preference in preferences:
            pair, remark = encode_pair(preference, classifier, config.data.too_long)
            counts.update([remark] if remark else [])
            pairs += [pair] if pair else []
        return pairs

    train, held_back = (encode_all(part) for part in read_preferences(config.data, note))
    tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in train)
    remarks = "".join(f"; {count} {remark}" for remark, count in counts.items())
    note(f"pairs: {len(train)} to train on, of {tokens} tokens; {len(held_back)} held out{remarks}")
    if not train or not held_back:
        which = "held-out pair" if train else "pair"
        raise UserError(f"data: no {which} is left{remarks}", "add pairs whose texts differ, or raise max_length")
    return RowSet(train, held_back, epochs=config.num_train_epochs, batch_size=config.batch_size, seed=config.seed)


def encode_pair(preference: Preference, classifier: TextClassifier, too_long: str) -> tuple[Pair | None, str]:
    """The pair as the reward model will score it, None if it is left out; and why it was cut or left out, if so.

    too_long: "truncate", "drop" or "refuse". Raises UserError, with file and line, for messages that the chat template
    does not accept, and for a text that is refused.
    """
    if not (preference.chosen.completion and preference.rejected.completion):
        return None, "left out, of which an answer is empty"
    try:
        sides = [classifier.encode(sample) for sample in (preference.chosen, preference.rejected)]
        classifier.check([*sides[0], *sides[1]])
    except UserError as error:
        raise UserError(f"{preference.where}: {error.problem}", error.remedy) from error
    longest, limit, remark = max(map(len, sides)), classifier.limit, ""
    if longest > limit:
        if too_long == "drop":
            return None, f"dropped, with more than {limit} tokens"
        if too_long == "refuse":
            raise UserError(
                f"{preference.where}: has a text of {longest} tokens, and it may have {limit}: max_length, or the "
                "model's context"
            )
        remark = f"cut to their last {limit} tokens"
    chosen, rejected = (np.array(ids[-limit:], np.int32) for ids in sides)
    if np.array_equal(chosen, rejected):
        return None, "left out, whose texts are equal"
    return Pair(chosen, rejected, preference.margin), remark
