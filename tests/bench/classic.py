"""A group's log-probs as Simple-GRPO computes them (the classic way), and a naive computation in float64.

The prompt is repeated for every completion, rows are padded on the right to the longest, the LM head runs on every
position, and each row goes through a log-softmax in the precision of the model.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup

Score = Callable[[Sequence[TokenGroup]], Tensor]


def classic(model: PreTrainedModel) -> Score:
    """Scores one group after the other; the result is (sum of C,) log-probs."""

    def score(groups: Sequence[TokenGroup]) -> Tensor:
        return torch.cat([logps for group in groups for logps in _padded(model, group)])

    return score


def naive_step(exact: PreTrainedModel, groups: Sequence[TokenGroup]) -> Tensor:
    """(sum of C,) log-probs of a float64 model, row by row; leaves the gradients of their sum in its `.grad`."""
    assert exact.dtype == torch.float64
    rows = []
    for group in groups:
        for row in single_rows(group):
            (logps,) = _padded(exact, row)
            logps.sum().backward()
            rows.append(logps.detach())
    return torch.cat(rows)


def _padded(model: PreTrainedModel, group: TokenGroup) -> Iterator[Tensor]:
    rows = [torch.cat([torch.tensor(group.prompt_ids), torch.tensor(ids)]) for ids in group.completions()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    for row, row_logits, row_ids in zip(rows, logits, ids[:, 1:], strict=True):
        logps = row_logits.log_softmax(dim=-1).gather(1, row_ids[:, None])[:, 0]
        yield logps[len(group.prompt_ids) - 1 : len(row) - 1]


def single_rows(group: TokenGroup) -> list[TokenGroup]:
    """The same completions as groups of one."""
    return [TokenGroup(group.prompt_ids, ids, np.array([len(ids)])) for ids in group.completions()]
