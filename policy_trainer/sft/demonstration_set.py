"""The demonstrations of a run: training rows in their order, and held-out rows."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import SftConfig
from policy_trainer.config.sft import SftDataConfig
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.sft.demonstrations import Demonstration, RowEncoder, encode_all, read_demonstrations
from policy_trainer.tasks.order import Shuffle
from policy_trainer.tasks.problem_set import EVAL_EVERY
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.models import context_length, eos_token_ids


class DemonstrationSet:
    """Training rows in batches, shuffled in each epoch by a pure function of the seed; and held-out rows."""

    def __init__(
        self, rows: Sequence[TokenGroup], eval_rows: Sequence[TokenGroup], *, epochs: int, batch_size: int, seed: int
    ) -> None:
        self.rows = rows
        self.eval_rows = eval_rows
        self._total = epochs * len(rows)
        self._batch_size = batch_size
        self._shuffle = Shuffle(len(rows), seed)

    @property
    def steps(self) -> int:
        """Steps of all epochs. The last step may have fewer rows than the others."""
        return -(-self._total // self._batch_size)

    def batch(self, step: int) -> list[TokenGroup]:
        """The rows of a step, counted from 0."""
        start = step * self._batch_size
        places = range(start, min(start + self._batch_size, self._total))
        return [self.rows[self._shuffle.place(place)] for place in places]


def load_demonstrations(
    config: SftConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]
) -> DemonstrationSet:
    """Reads and encodes the demonstrations, and calls `note` with a summary. Raises UserError for unusable data."""
    data = config.data
    limits = [limit for limit in (config.max_length, context_length(model)) if limit is not None]
    encoder = RowEncoder(
        tokenizer,
        PromptEncoder(tokenizer, data),
        eos=_end_of_completions(model, tokenizer),
        limit=min(limits, default=None),
    )
    train, held_back = split(data)
    rows, dropped = encode_all(train, encoder, data.too_long)
    eval_rows, eval_dropped = encode_all(held_back, encoder, data.too_long)
    note(
        f"demonstrations: {len(rows)} to train on, of {sum(row.tokens for row in rows)} tokens; "
        f"{len(eval_rows)} held out; {dropped + eval_dropped} dropped as too long"
    )
    if not rows or not eval_rows:
        which = "held-out demonstration" if rows else "demonstration"
        raise UserError(
            f"data.path: no {which} is left; those that are too long for max_length or the model are dropped"
        )
    return DemonstrationSet(
        rows, eval_rows, epochs=config.num_train_epochs, batch_size=config.batch_size, seed=config.seed
    )


def split(data: SftDataConfig) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and held-out ones. Without data.eval_path no problem is in both."""
    found = read_demonstrations(data.path, "data.path")
    if data.eval_path:
        return found, read_demonstrations(data.eval_path, "data.eval_path")
    held_back = found[::EVAL_EVERY]
    held_out = {str(demonstration.problem) for demonstration in held_back}
    train = [demonstration for demonstration in found if str(demonstration.problem) not in held_out]
    if not train:
        raise UserError(
            f"data.path: {data.path} leaves no demonstration to train on: one of every {EVAL_EVERY}, "
            "and each copy of it, is held out; add some, or name held-out ones with --data.eval-path"
        )
    return train, held_back


def _end_of_completions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's eos id if samplers stop at it, else the first id that samplers stop at."""
    ends = eos_token_ids(model, tokenizer)
    own = tokenizer.eos_token_id
    return own if own in ends else ends[0]
