"""What a scoring loop packs into a forward, in which order, and which jobs fail."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from ref_server.metrics import ScoringTotals
from ref_server.queue.errors import StorageBroken, WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import Claim, Upload
from ref_server.scoring.jobs import ScoringGate
from ref_server.scoring.loop import ScoringLoop
from ref_server.scoring.reference import Busy, DeviceLost, NotReady, Scores
from ref_server.scoring.scorer import Scorer
from shared import wire
from shared.api import State
from shared.batch import Batch, BatchError, TokenGroup
from shared.logprobs import choose_forward
from tests.ref_server.calls import Rollout
from tests.ref_server.scoring.changed_models import randomly_changed_model
from tests.ref_server.scoring.queued import put, ref_logps, scored, settled
from tests.rounding import rounding

Naive = Callable[[TokenGroup, float], np.ndarray]
# Log-probs of an untrained model lie near -log(260) = -5.6, at half the temperature near twice that.
TOLERANCE = rounding(16)
POISON = 13


class Recorded:
    """A reference that calls `before`, and records the first token of each group of each forward."""

    def __init__(self, model: PreTrainedModel, version: int, before: Callable[[Sequence[TokenGroup]], object]) -> None:
        self._scorer = Scorer(choose_forward(model), version, "cpu")
        self._before = before
        self.version = version
        self.device = "cpu"
        self.forwards: list[list[int]] = []

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool = False) -> Scores:
        self.forwards.append([int(group.prompt_ids[0]) for group in groups])
        self._before(groups)
        return self._scorer.score(groups, temperatures, likeliest=likeliest)


Reference = Callable[..., Any]


@pytest.fixture
def reference(model: PreTrainedModel) -> Reference:
    def make(before: Callable[[Sequence[TokenGroup]], object] = lambda groups: None, version: int = 0) -> Recorded:
        return Recorded(model, version, before)

    return make


@pytest.fixture
def totals() -> ScoringTotals:
    return ScoringTotals()


@pytest.fixture
def loop_of(queue: Queue, totals: ScoringTotals) -> Iterator[Callable[..., ScoringLoop]]:
    """Makes loops of 160 tokens a forward, to be started by the test, and ends them before the queue is closed."""
    loops: list[ScoringLoop] = []

    def make(reference: Any, queue: Any, tokens: int = 160) -> ScoringLoop:
        options: Any = {"tokens_per_forward": tokens, "on_ready": lambda: None}
        loops.append(ScoringLoop(reference, queue, totals.of("cpu"), ScoringGate(), **options))
        return loops[-1]

    yield make
    for loop in loops:
        loop.stop()
        loop.join()


@pytest.fixture
def named(rollout: Rollout) -> Rollout:
    """A batch of ten tokens, or of `length` more, whose first token is given."""

    def make(first: int, length: int = 0, **fields: Any) -> Batch:
        made = rollout(prompt=5, lengths=(2, 3 + length), **fields)
        made.group.prompt_ids[0] = first
        return made

    return make


def stored(queue: Queue, batch: Batch) -> Batch:
    settled(queue, batch)
    payload = queue.payload(batch.id)
    assert payload is not None
    return scored(wire.with_scores(*payload))


def submit(loop: ScoringLoop, *batches: Batch) -> list[Future[Scores]]:
    return [loop.submit([batch.group], batch.temperature) for batch in batches]


# Packing


def test_direct_requests_and_batches_share_a_forward(
    loop_of: Any, reference: Reference, queue: Queue, rollout: Rollout, naive_logps: Naive, totals: ScoringTotals
) -> None:
    shapes = [(5, (4, 1, 7), 1.0), (1, (1,), 0.5), (40, (3, 30), 1.7), (2, (9,), 0.8)]
    requests, batches = ([rollout(p, n, temperature=t) for p, n, t in shapes] for _ in range(2))
    recorded = reference()
    loop = loop_of(recorded, queue, 1000)
    answers = submit(loop, *requests)
    put(queue, *batches)
    loop.start()
    for batch, answer in zip(requests, answers, strict=True):
        (logps,) = answer.result(20).logps
        np.testing.assert_allclose(logps, naive_logps(batch.group, batch.temperature), atol=TOLERANCE)
    for batch in batches:
        expected = naive_logps(batch.group, batch.temperature)
        np.testing.assert_allclose(ref_logps(stored(queue, batch)), expected, atol=TOLERANCE)
    assert recorded.forwards == [[int(each.group.prompt_ids[0]) for each in (*requests, *batches)]]
    tokens = sum(each.group.tokens for each in requests)
    counts = totals.counts()
    expected = {"direct_tokens": tokens, "tokens": tokens, "batches": 4, "errors": 0}
    assert {name: counts[name] for name in expected} == expected
    samples = totals.registry.get_sample_value
    assert samples("tandem_forward_seconds_count", {"device": "cpu"}) == 1
    assert samples("tandem_forward_seconds_sum", {"device": "cpu"}) == counts["working_seconds"]


def test_direct_requests_starve_no_batch(loop_of: Any, reference: Reference, queue: Queue, named: Rollout) -> None:
    """They get three quarters of a forward while batches wait, small or large."""
    refilling = threading.Event()
    refilling.set()

    def refill(_: object) -> None:
        with suppress(Busy):
            while refilling.is_set() and len(recorded.forwards) < 100:
                submit(loop, named(1))

    recorded = reference(refill)
    loop = loop_of(recorded, queue)
    batches = [*(named(2) for _ in range(6)), named(3, length=60), named(4, length=300), named(5)]
    put(queue, *batches)
    submit(loop, *(named(1) for _ in range(60)))
    loop.start()
    for batch in batches:
        settled(queue, batch)
    refilling.clear()
    assert recorded.forwards[:6] == [[1] * 12 + [2] * 4, [1] * 12 + [2] * 2, [1] * 12, [3], [1] * 12, [4]]
    assert recorded.forwards[6] == [1] * 12 + [5]


def test_batches_do_not_delay_a_direct_request(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout
) -> None:
    answers: list[Future[Scores]] = []

    def go_on(_: object) -> None:
        if len(recorded.forwards) < 20:
            put(queue, named(2), named(3, length=200))
            if len(recorded.forwards) % 5 == 0:
                answers.extend(submit(loop, named(1)))

    recorded = reference(go_on)
    loop = loop_of(recorded, queue)
    put(queue, *(named(2) for _ in range(100)))
    loop.start()
    while len(recorded.forwards) < 20:
        time.sleep(0.01)
    for answer in answers:
        answer.result(20)
    after = [recorded.forwards[n][:1] for n in (5, 10, 15)]
    assert after == [[1]] * 3, "in the forward after the one that was in hand, before what is queued"


def test_a_request_larger_than_a_forward_is_scored_by_itself(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout
) -> None:
    recorded = reference()
    loop = loop_of(recorded, queue)
    answers = submit(loop, named(1), named(2, length=300), named(3))
    loop.start()
    assert all(answer.result(20) for answer in answers)
    assert recorded.forwards == [[1], [2], [3]]


def test_batches_whose_teacher_reads_more_share_fewer_forwards(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout
) -> None:
    """Ten batches of ten tokens are claimed together; with a teacher's prompt of 70 two of them fill a forward."""
    recorded = reference()
    loop = loop_of(recorded, queue)
    batches = [named(first) for first in range(1, 11)]
    teacher_prompt = np.full(70, 3, np.int64)
    batches[3:] = [
        replace(batch, group=replace(batch.group, teacher_prompt_ids=teacher_prompt)) for batch in batches[3:]
    ]
    put(queue, *batches)
    loop.start()
    for batch in batches:
        settled(queue, batch)
    assert recorded.forwards == [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]


# Failures


def test_only_jobs_at_fault_fail(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout, naive_logps: Naive, totals: ScoringTotals
) -> None:
    def before(groups: Sequence[TokenGroup]) -> None:
        if any(group.prompt_ids[0] == POISON for group in groups):
            raise RuntimeError("no kernel takes this")

    recorded = reference(before)
    loop = loop_of(recorded, queue)
    requests = [named(first) for first in (1, 2, POISON, 3, 4)]
    batches = [named(first) for first in (5, POISON, 6)]
    answers = submit(loop, *requests)
    put(queue, *batches)
    loop.start()
    with pytest.raises(RuntimeError, match="no kernel takes this"):
        answers[2].result(20)
    for n in (0, 1, 3, 4):
        (logps,) = answers[n].result(20).logps
        np.testing.assert_allclose(logps, naive_logps(requests[n].group, 1.0), atol=TOLERANCE)
    dead = settled(queue, batches[1], State.DEAD)
    assert dead.scoring_attempts == 3 and "RuntimeError: no kernel takes this" in str(dead.reason)
    assert {settled(queue, batches[n]).scoring_attempts for n in (0, 2)} == {0}
    counts = totals.counts()
    assert (counts["errors"], counts["batches"], counts["direct_tokens"]) == (3, 2, 40)
    assert [forward for forward in recorded.forwards if POISON not in forward] == [[1, 2], [3], [4, 5], [6]]


def test_scores_that_are_not_finite(loop_of: Any, reference: Reference, queue: Queue, named: Rollout) -> None:
    """And the forward is repeated for no other job."""
    recorded = reference()
    score = recorded.score

    def overflowing(groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool) -> Scores:
        scores = score(groups, temperatures, likeliest=likeliest)
        for group, logps in zip(groups, scores.logps, strict=True):
            if group.prompt_ids[0] == POISON:
                logps[-1] = np.nan
        return scores

    recorded.score = overflowing
    loop = loop_of(recorded, queue)
    answers = submit(loop, named(1), named(POISON), named(3))
    batches = [named(4), named(POISON)]
    put(queue, *batches)
    loop.start()
    with pytest.raises(BatchError, match="completion_ids have log-probs that are not finite"):
        answers[1].result(20)
    assert all(np.isfinite(answers[n].result(20).logps[0]).all() for n in (0, 2))
    assert settled(queue, batches[0]).scoring_attempts == 0
    assert "must be finite" in str(settled(queue, batches[1], State.DEAD).reason)
    together, *again = recorded.forwards
    assert together == [1, POISON, 3, 4, POISON] and again == [[POISON]] * 4


def test_a_body_that_cannot_be_read_is_dead(loop_of: Any, reference: Reference, queue: Queue, named: Rollout) -> None:
    bad, good = named(2), named(3)
    queue.put(Upload(bad.id, b"." * 32, "test", 0, 0, 5, 5, 2, b"damaged"))
    put(queue, good)
    recorded = reference()
    loop = loop_of(recorded, queue)
    (answer,) = submit(loop, named(1))
    loop.start()
    answer.result(20)
    assert settled(queue, good).scoring_attempts == 0
    assert settled(queue, bad, State.DEAD).scoring_attempts == 3
    assert recorded.forwards == [[1, 3]]


def test_a_refused_result_delays_no_other(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, batch = named(2), named(3)
    complete = queue.complete

    def refuse(id: str, body: bytes) -> None:
        if id == gone.id:
            raise WrongState("it was dropped")
        complete(id, body)

    monkeypatch.setattr(queue, "complete", refuse)
    put(queue, gone, batch)
    loop_of(reference(), queue).start()
    settled(queue, batch)


def test_direct_requests_need_no_store(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.scoring.loop.REST_SECONDS", 1.0)
    batch = named(2)
    put(queue, batch)
    calls: list[int] = []

    def broken(max_tokens: int, reference_version: int) -> list[Claim]:
        calls.append(max_tokens)
        raise StorageBroken("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(queue, "claim", broken)
        loop = loop_of(reference(), queue)
        loop.start()
        for _ in range(20):
            submit(loop, named(1))[0].result(20)
        assert 0 < len(calls) < 20, "not called for each of them"
    assert settled(queue, batch).scoring_attempts == 0


@pytest.mark.parametrize("error", [DeviceLost, SystemExit])
def test_a_loop_that_ends_answers_all(
    loop_of: Any, reference: Reference, queue: Queue, named: Rollout, error: type[BaseException]
) -> None:
    def before(_: object) -> None:
        raise error("gone")

    loop = loop_of(reference(before), queue)
    answers = submit(loop, *(named(1) for _ in range(20)))  # more than go into one forward
    replaced = loop.replace(reference())
    batch = named(2)
    put(queue, batch)
    loop.start()
    for answer in (*answers, replaced):
        with pytest.raises(NotReady, match="ended with an error"):
            answer.result(20)
    loop.join()
    assert loop.failed
    assert settled(queue, batch, State.SCORING).scoring_attempts == 0
    with pytest.raises(NotReady):
        submit(loop, named(1))


# Order


def test_replaced_weights(loop_of: Any, reference: Reference, queue: Queue, named: Rollout) -> None:
    other = randomly_changed_model()
    first, second, third = reference(), Recorded(other, 1, lambda _: None), reference(version=2)
    loop = loop_of(first, queue)
    between = named(2)
    answers = submit(loop, *(named(1) for _ in range(20)))  # more than one forward holds
    replaced = [loop.replace(second)]
    answers += submit(loop, between)
    replaced += [loop.replace(third)]
    answers += submit(loop, named(3))
    assert not any(each.done() for each in replaced)
    loop.start()
    versions = [answer.result(20).reference_version for answer in answers]
    assert versions == [0] * 20 + [1, 2]
    assert all(each.done() for each in replaced)
    (logps,) = answers[20].result().logps
    expected = choose_forward(other)([between.group], [1.0]).detach().numpy()
    np.testing.assert_allclose(logps, expected, atol=TOLERANCE)
    assert (first.forwards, second.forwards, third.forwards) == ([[1] * 12, [1] * 8], [[2]], [[3]])
    batch = named(4)
    put(queue, batch)
    loop.ring()
    assert stored(queue, batch).reference_version == "2"


def test_a_stopping_loop(loop_of: Any, reference: Reference, queue: Queue, named: Rollout) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before(_: object) -> None:
        begun.set()
        go_on.wait()

    recorded = reference(before)
    loop = loop_of(recorded, queue)
    in_hand, left = named(2), named(3)
    put(queue, in_hand)
    loop.start()
    begun.wait()
    put(queue, left)
    answers = submit(loop, *(named(1) for _ in range(20)))
    replaced = loop.replace(reference(version=1))
    answers[0].cancel()
    loop.stop()
    with pytest.raises(NotReady, match="shutting down"):
        submit(loop, named(1))
    go_on.set()
    loop.join()
    assert not loop.failed
    assert all(answer.result(0).reference_version == 0 for answer in answers[1:])
    assert replaced.done()
    assert settled(queue, in_hand).scoring_attempts == 0
    assert settled(queue, left, State.QUEUED)
    assert recorded.forwards == [[2], [1] * 12, [1] * 7]
