"""The demonstrations of a run: training rows in their order, and held-out rows."""

from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import SftConfig
from policy_trainer.config.supervised import SftDataConfig
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.sft.demonstrations import Demonstration, RowEncoder, encode_all, read_demonstrations
from policy_trainer.supervised.row_set import RowSet, every_tenth
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.models import context_length, eos_token_ids


def load_demonstrations(
    config: SftConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]
) -> RowSet[TokenGroup]:
    """Reads and encodes the demonstrations, and calls `note` with a summary. Raises UserError for unusable data."""
    data = config.data
    limits = [limit for limit in (config.max_length, context_length(model)) if limit is not None]
    encoder = RowEncoder(
        tokenizer,
        PromptEncoder(tokenizer, data),
        eos=_end_of_completions(model, tokenizer),
        limit=min(limits, default=None),
    )
    train, held_back = split(data, note)
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
    return RowSet(rows, eval_rows, epochs=config.num_train_epochs, batch_size=config.batch_size, seed=config.seed)


def split(data: SftDataConfig, note: Callable[[str], None]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and held-out ones. Without data.eval_path no problem is in both."""
    found = read_demonstrations(data.path, "data.path")
    if data.eval_path:
        return found, read_demonstrations(data.eval_path, "data.eval_path")
    return every_tenth(found, lambda demonstration: str(demonstration.problem), f"data.path: {data.path}", note)


def _end_of_completions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's eos id if samplers stop at it, else the first id that samplers stop at."""
    ends = eos_token_ids(model, tokenizer)
    own = tokenizer.eos_token_id
    return own if own in ends else ends[0]
