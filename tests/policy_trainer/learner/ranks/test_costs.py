"""What a rank holds and sends is what the arithmetic says: counted in real processes, joined by torchrun."""

from pathlib import Path

import pytest

from benchmarks.ranks import WIDTHS, Case, make_model, measure, planned, sent
from policy_trainer.trainer import memory

# Buffers of the rotary embedding, random states and the like.
_SMALL = 4096


@pytest.mark.long
@pytest.mark.parametrize("case", [Case(4), Case(2, micro_batches=2)], ids=lambda case: f"{case}")
def test_a_rank_has_its_share_and_sends_what_is_planned(case: Case, tmp_path: Path) -> None:
    shape = make_model(tmp_path, hidden=128)
    between, most = planned(case, shape)
    shares = measure(case, tmp_path)
    assert len(shares) == case.ranks
    for share in shares:
        assert share.forwards == case.micro_batches
        held = shape.parameters * 4 // case.ranks
        assert (share.parameters, share.gradients, share.moments) == (held, held, 2 * held)
        assert between == 4 * held <= share.allocated <= between + _SMALL
        assert 0.95 < most / share.peak < 1.35
        # Each layer for a forward and for its backward, the rest once for both; gradients once a step.
        assert share.calls["gathers"] == case.micro_batches * (2 * shape.layers + 1)
        assert share.calls["scatters"] == shape.layers + 1
        moved = memory.traffic(shape, WIDTHS[case.dtype], ranks=case.ranks, micro_batches=case.micro_batches)
        assert sent(case, share) == moved
        assert share.whole["others"] < _SMALL
