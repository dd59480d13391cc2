"""The ways of decoding: which models and prompts take which, and that all say the same."""

import pytest
import torch
from torch import Tensor

from policy_trainer.sampling.copied_prompts import CopiedPrompts
from policy_trainer.sampling.decoding import Decoding, RepeatedPrompts, compute_prompts
from policy_trainer.sampling.grid import Grid
from policy_trainer.sampling.growing import takes_our_attention
from policy_trainer.sampling.hf import make_decoding, using_attention
from policy_trainer.sampling.shared_prompts import SharedPrompts
from tests.policy_trainer.sampling.architectures import ARCHITECTURES, PROMPTS, REPEATING, SHARING


def test_those_take_our_attention_that_attend_to_all_tokens_through_the_interface() -> None:
    takes = {name: takes_our_attention(make()) for name, make in ARCHITECTURES.items()}
    assert takes == dict.fromkeys(SHARING, True) | dict.fromkeys(REPEATING, False)


@pytest.mark.parametrize("architecture", list(SHARING))
@pytest.mark.parametrize("prompts", [PROMPTS, [[7, 8, 9], [9, 8, 7]]], ids=["padded", "of one length"])
def test_all_say_the_same(architecture: str, prompts: list[list[int]]) -> None:
    """Also after rows have changed places, and after a whole group has left."""
    torch.manual_seed(3)
    model = SHARING[architecture]().eval()
    tokens = torch.arange(3 * len(prompts)) + 10
    said = []
    for make in (SharedPrompts, CopiedPrompts, RepeatedPrompts):
        with torch.inference_mode():
            decoding: Decoding = make(model, compute_prompts(model, prompts), 3)
            with using_attention(model, decoding.attention):
                logits = [decoding.advance(tokens), decoding.advance(tokens + 1)]
                for places in (torch.tensor([5, 1, 2, 3]), torch.tensor([3, 0])):
                    decoding.select(places)
                    logits += [decoding.advance(tokens[: len(places)]), decoding.advance(tokens[-len(places) :])]
        said.append(logits)
    for shared, copied, repeated in zip(*said, strict=True):
        assert (shared - repeated).abs().max() < 2e-5 * repeated.abs().max()
        assert (copied - repeated).abs().max() < 2e-5 * repeated.abs().max()


@pytest.mark.parametrize(("tokens", "kind"), [(64, CopiedPrompts), (65, SharedPrompts)])
def test_short_prompts_are_copied_and_long_ones_shared(tokens: int, kind: type[Decoding]) -> None:
    model = next(iter(SHARING.values()))().eval()
    with torch.inference_mode():
        decoding = make_decoding(model, compute_prompts(model, [[5] * tokens]), 2)
    assert type(decoding) is kind


def spread(groups: list[int], heads: int, x: Tensor) -> list[Tensor]:
    """Each group's and head's matrix, row by row."""
    rows = x.unflatten(0, (-1, heads))
    return [
        torch.cat([rows[row, head] for row, mine in enumerate(groups) if mine == group])
        for group in range(max(groups) + 1)
        for head in range(heads)
    ]


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 0, 0, 1], [2, 0, 1, 0, 2, 2], [0], [0, 1, 2]])
def test_a_grid_has_each_groups_rows_side_by_side(groups: list[int]) -> None:
    heads = 2
    grid = Grid(torch.tensor(groups), heads)
    x = torch.randn(len(groups) * heads, 3, 5)
    laid_out = grid.spread(x)
    for matrix, expected in zip(laid_out, spread(groups, heads, x), strict=True):
        assert torch.equal(matrix[: len(expected)], expected)
    assert torch.equal(grid.collect(laid_out), x)
