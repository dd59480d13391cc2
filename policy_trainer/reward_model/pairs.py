"""The pairs of a run as token ids."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from policy_trainer.config.supervised import RewardTrainingConfig
from policy_trainer.reward_model.preferences import Preference, read_preferences
from policy_trainer.rewards.text_classifier import TextClassifier
from policy_trainer.supervised.row_set import RowSet
from shared.batch import Array
from shared.errors import UserError


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
