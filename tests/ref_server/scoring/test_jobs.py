"""The jobs of a scoring loop: direct requests, and stored bodies."""

import sys
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from ref_server.metrics.totals import ScoringTotals
from ref_server.scoring.jobs import DirectRequest, DirectRequests, Replacement, read_payload
from ref_server.scoring.reference import NotReady, Scores
from ref_server.scoring.scorer import Scorer
from shared import wire
from shared.batch import ScoredBatch, TokenGroup
from tests.ref_server.calls import Rollout


def direct(tokens: int = 2) -> DirectRequest:
    group = TokenGroup(np.array([1]), np.ones(tokens - 1, dtype=np.int64), np.array([tokens - 1]))
    return DirectRequest(group, 1.0, ScoringTotals().of("cpu"))


def line_of(*waiting: DirectRequest | Replacement) -> DirectRequests:
    line = DirectRequests()
    for request in waiting:
        line.add(request, most=sys.maxsize)
    return line


def other_weights() -> Replacement:
    return Replacement(Scorer(lambda groups, temperatures: torch.zeros(0), 1, "cpu"))


def test_the_oldest_requests_are_taken_up_to_the_budget() -> None:
    waiting = [direct(tokens) for tokens in (4, 5, 2, 9, 1 + 1)]
    line = line_of(*waiting)
    assert len(line) == 5
    taken = [line.take(10), line.take(8), line.take(8), line.take(8)]
    assert taken == [waiting[:2], waiting[2:3], waiting[3:4], waiting[4:]], "in order; one that is too large by itself"
    assert (line.take(8), len(line)) == ([], 0)


def test_no_request_is_taken_from_behind_a_replacement() -> None:
    before, behind, weights = direct(), direct(), [other_weights(), other_weights()]
    line = line_of(before, *weights, behind)
    assert line.next_replacement() is None
    assert line.take(100) == [before]
    assert line.take(100) == []
    assert [line.next_replacement() for _ in range(3)] == [*weights, None]
    assert line.take(100) == [behind]


def test_cancelled_requests_are_skipped() -> None:
    gone, small, behind = direct(9), direct(), direct(9)
    line = line_of(gone, small, behind)
    gone.answer.cancel()
    assert line.take(10) == [small]
    behind.answer.cancel()
    assert line.take(10) == []


def test_every_request_is_answered() -> None:
    answered, in_hand, waiting, gone, weights = direct(), direct(), direct(), direct(), other_weights()
    line = line_of(answered, in_hand, waiting, gone, weights)
    line.take(4)
    answered.fail(ValueError("mine"))
    gone.answer.cancel()
    line.refuse_all()
    with pytest.raises(ValueError, match="mine"):
        answered.answer.result(0)
    refused: list[Future] = [in_hand.answer, waiting.answer, weights.answer]
    for answer in refused:
        with pytest.raises(NotReady, match="ended with an error"):
            answer.result(0)
    with pytest.raises(NotReady, match="shutting down"):
        line.add(direct(), most=10)


# Stored bodies


def test_a_rollout_batch_becomes_a_scored_one(rollout: Rollout) -> None:
    batch = rollout(lengths=(2, 3), temperature=0.7)
    (group,), temperatures, with_scores = read_payload("run", wire.encode(batch))
    assert list(temperatures) == [0.7]
    np.testing.assert_array_equal(group.completion_ids, batch.group.completion_ids)
    logps = -np.arange(5, dtype=np.float32)
    scored = wire.decode(with_scores(Scores([logps], 17)))
    assert isinstance(scored, ScoredBatch)
    assert scored.reference_version == "17"
    np.testing.assert_array_equal(scored.ref_logps, logps)
    assert wire.content_hash(wire.encode(scored.rollout)) == wire.content_hash(wire.encode(batch))
