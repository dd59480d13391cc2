"""The feed of leases against a server on a socket that loses leases, repeats batches, and keeps an exact record."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import LossConfig
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.queue_client.feed import BatchBuffer, LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.terms import BatchCheck, LeaseTerms
from shared import wire
from shared.api import Lease
from shared.batch import RolloutBatch, ScoredBatch, StepRewards, TokenGroup
from shared.client import RefServerClient, RefServerError
from tests.waiting import until

CHECKPOINT = Path("checkpoints/step-00000008")
LOSS = LossConfig()
VOCABULARY, CONTEXT = 100, 50


class RefServer:
    """Leases as API.md has them, kept in dictionaries. `lose` is what time does to a lease.

    No more than `max_in_flight` are out at once.
    """

    def __init__(self, open_site: Callable[..., Any]) -> None:
        self.lock = threading.RLock()
        self.bodies: dict[str, bytes] = {}
        self.ready: list[str] = []
        self.tokens: dict[str, str] = {}
        self.done: list[str] = []
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.forced: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.leases = 0
        self.asked_for: list[int] = []  # counts of the requests that got batches
        self.max_in_flight = 100
        self.refuses = False
        self.taken_for: float | None = None
        self.finished: list[tuple[str, Any]] = []
        self.site = open_site(self.respond)

    def put(self, *batches: Any) -> list[str]:
        with self.lock:
            for batch in batches:
                self.bodies[batch.rollout.id] = wire.encode(batch)
                self.ready.append(batch.rollout.id)
        return [batch.rollout.id for batch in batches]

    def lose(self, *ids: str) -> None:
        with self.lock:
            for id in ids:
                del self.tokens[id]
                self.ready.append(id)

    def respond(self, request: Any) -> Any:
        if request.method == "GET":
            return self.describe(request.path.rpartition("/")[2])
        body = json.loads(request.body)
        verb = request.path.rpartition("/")[2]
        with self.lock:
            if self.refuses:
                return self.site.answer(422, b"refused")
            if verb == "finish":
                self.finished.append((request.path, body))
                return self.site.answer(200, b'{"expired": 0}')
            if verb == "lease" and self.taken_for is not None:
                error = {"error": {"code": "run_taken", "message": "another's", "request_id": "1"}}
                return self.site.answer(409, json.dumps(error).encode(), {"Retry-After": f"{self.taken_for:.0f}"})
            if verb != "lease":
                outcomes = {key["id"]: self.settle(verb, key["id"], key["token"]) for key in body["leases"]}
                self.calls.append((verb, body, outcomes))
                results = [{"id": key["id"], "outcome": outcomes[key["id"]]} for key in body["leases"]]
                return self.site.answer(200, json.dumps({"results": results}).encode())
            if len(self.tokens) >= self.max_in_flight:
                error = {"error": {"code": "in_flight_full", "message": "all leased"}}
                return self.site.answer(429, json.dumps(error).encode(), {"Retry-After": "0"})
            if self.ready:
                given = [self.give() for _ in range(min(body["count"], len(self.ready)))]
                self.asked_for.append(body["count"])
                return self.site.answer(
                    200, b"".join(wire.encode_leases(given)), {"Content-Type": wire.LEASES_CONTENT_TYPE}
                )
        time.sleep(0.02)
        return self.site.answer(204)

    def give(self) -> tuple[Lease, bytes]:
        id = self.ready.pop(0)
        self.leases += 1
        self.tokens[id] = f"token-{self.leases}"
        body = self.bodies[id]
        return Lease(id=id, token=self.tokens[id], lease_seconds=60, deliveries=1, bytes=len(body)), body

    def describe(self, id: str) -> Any:
        with self.lock:
            state = "done" if id in self.done else self.states.get(id, "ready" if id in self.bodies else None)
        if state is None:
            error = {"error": {"code": "not_found", "message": "no such batch"}}
            return self.site.answer(404, json.dumps(error).encode())
        numbers = ("epoch", "policy_version", "prompt_tokens", "completion_tokens", "completions", "payload_bytes")
        counts = dict.fromkeys((*numbers, "deliveries", "scoring_attempts", "admitted_at"), 0)
        words = {"id": id, "run": "test", "state": state, "reason": None, "consumer": None, "history": []}
        return self.site.answer(200, json.dumps({**counts, **words}).encode())

    def settle(self, verb: str, id: str, token: str) -> str:
        if id in self.forced:
            return self.forced[id]
        if self.tokens.get(id) != token:
            return "stale"
        if verb == "ack":
            del self.tokens[id]
            self.done.append(id)
        elif verb == "release":
            del self.tokens[id]
        return "ok"

    def asked(self, verb: str) -> list[str]:
        """Ids in all calls of a verb, in order."""
        with self.lock:
            return [key["id"] for name, body, _ in self.calls if name == verb for key in body["leases"]]


@pytest.fixture
def server(open_site: Callable[..., Any]) -> RefServer:
    return RefServer(open_site)


@pytest.fixture
def open_feed(server: RefServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeaseFeed]]:
    monkeypatch.setattr("policy_trainer.queue_client.terms._ASK_SECONDS", 0.02)
    monkeypatch.setattr("policy_trainer.queue_client.feed._LOOK_SECONDS", 0.1)
    opened: list[tuple[LeaseFeed, RefServerClient]] = []

    def make(
        ledger: Ledger | None = None,
        *,
        ahead: int = 4,
        max_lag: int | None = None,
        lease_seconds: float = 60,
        allowance: int = 100,
        version: int = 0,
        loss: LossConfig = LOSS,
    ) -> LeaseFeed:
        client = RefServerClient(server.site.url, patience=None)
        terms = LeaseTerms("trainer", "test", epoch=0, max_lag=max_lag, lease_seconds=lease_seconds)
        ledger = Ledger() if ledger is None else ledger
        intake = BatchCheck(loss, VOCABULARY, CONTEXT)
        feed = LeaseFeed(client, terms, ledger, intake, ahead=ahead, allowance=allowance, version=version)
        opened.append((feed, client))
        return feed

    yield make
    for feed, client in opened:
        server.refuses = False
        feed.close()
        client.close()


@pytest.fixture
def batches(make_scored: Any) -> Callable[..., list[Any]]:
    def make(count: int, version: int = 0, first: int = 0) -> list[Any]:
        return [
            make_scored([3], [[4], [5]], [0.0, 1.0], version=version, number=first + number) for number in range(count)
        ]

    return make


def spoiled(batch: Any, **values: Any) -> None:
    """Gives a batch values that its constructor refuses. group: a prompt and completions of one token each."""
    for name, value in values.items():
        if name == "group":
            prompt, completions = (np.array(ids, np.int64) for ids in value)
            value = TokenGroup(prompt, completions, np.ones(len(completions), np.int64))
        elif isinstance(value, tuple):
            value = np.array(value, np.float32)
        object.__setattr__(batch if name == "ref_logps" else batch.rollout, name, value)


def patience(seconds: float) -> None:
    assert seconds < 60, "nothing has come for a minute"


def taken(feed: LeaseFeed, count: int, version: int = 0) -> Any:
    return feed.take(count, version=version, on_idle=patience)


def ids(leased: Any) -> list[str]:
    return [lease.id for lease in leased]


class Enough(Exception):
    pass


def impatient(seconds: float) -> None:
    raise Enough


class TestEnter:
    """Nothing of a run may be published before the server leases to it."""

    def test_at_once_where_nobody_has_the_run(self, open_feed: Any) -> None:
        notes: list[str] = []
        open_feed().enter(on_wait=lambda reason, seconds: patience(seconds), note=notes.append)
        assert notes == []

    def test_waits_until_the_other_is_taken_for_gone(self, server: RefServer, open_feed: Any) -> None:
        server.taken_for = 30
        feed, notes, reasons = open_feed(), [], []

        def on_wait(reason: str, seconds: float) -> None:
            patience(seconds)
            reasons.append(reason)
            if notes:
                server.taken_for = None

        feed.enter(on_wait=on_wait, note=notes.append)
        assert notes == [reasons[-1]]
        assert "waiting up to 30 s to see whether it lives" in notes[0]

    def test_refused_where_the_other_lives(self, server: RefServer, open_feed: Any) -> None:
        server.taken_for = 30

        def on_wait(reason: str, seconds: float) -> None:
            patience(seconds)
            server.taken_for = 60  # it was heard again

        with pytest.raises(RunFailed, match="run: another trainer trains a run named 'test'"):
            open_feed().enter(on_wait=on_wait, note=lambda text: None)

    def test_a_run_that_is_lost_fails_where_batches_are_taken(self, server: RefServer, open_feed: Any) -> None:
        feed = open_feed()
        feed.enter(on_wait=lambda reason, seconds: patience(seconds), note=lambda text: None)
        server.taken_for = 30
        with pytest.raises(RunFailed, match="has taken it from this one"):
            taken(feed, 1)


def test_what_is_put_back_is_taken_again_though_it_was_scored_again(
    server: RefServer, open_feed: Any, batches: Any
) -> None:
    names = server.put(*batches(2))
    feed = open_feed()
    feed.put_back([replace(lease, batch=lease.batch) for lease in taken(feed, 2)])
    assert ids(taken(feed, 2)) == names
    assert server.asked("release") == []


class TestForeignBatches:
    """A batch that weights of this run cannot have sampled."""

    def test_of_a_version_that_does_not_exist_yet(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        """Whoever uploads must not end the run: it is given back with the reason."""
        bad, good = server.put(*batches(1, version=4), *batches(1, version=3, first=1))
        assert ids(taken(open_feed(version=3), 1, version=3)) == [good]
        (body,) = [body for verb, body, _ in server.calls if verb == "release"]
        assert [key["id"] for key in body["leases"]] == [bad]
        assert "policy_version 4, but this run has made 3 steps" in body["error"]

    @pytest.mark.parametrize("field", ["run", "lineage"])
    def test_of_another_run_or_lineage(self, server: RefServer, open_feed: Any, batches: Any, field: str) -> None:
        (batch,) = batches(1)
        server.put(ScoredBatch(replace(batch.rollout, **{field: "other"}), batch.ref_logps, "0"))
        with pytest.raises(RunFailed, match=f"{field} 'other'"):
            taken(open_feed(), 1)


def test_the_end_of_a_run_is_told_once_nothing_is_leased_any_more(
    server: RefServer, open_feed: Any, batches: Any
) -> None:
    known = server.put(*batches(2))
    feed = open_feed()
    until(lambda: server.leases == 2)
    feed.finish()
    assert sorted(server.asked("release")) == sorted(known)
    assert server.finished == [("/v1/runs/test/finish", {})]


class TestTake:
    def test_in_order_and_marked_as_started(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        known = server.put(*batches(5))
        feed = open_feed()
        assert ids(taken(feed, 3)) == known[:3]
        verb, body, _ = server.calls[-1]
        assert verb == "extend" and body["started"] is True and body["lease_seconds"] == 60
        assert [key["id"] for key in body["leases"]] == known[:3]
        assert ids(taken(feed, 2)) == known[3:]

    def test_waits_for_what_comes_later(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        feed, waited = open_feed(), []

        def on_idle(seconds: float) -> None:
            patience(seconds)
            waited.append(seconds)
            if len(waited) == 2:
                server.put(*batches(2))

        assert len(feed.take(2, version=0, on_idle=on_idle)) == 2
        assert len(waited) == 2 and 0.08 < waited[0] < waited[1]

    def test_leases_no_more_than_a_few_ahead(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        server.put(*batches(9))
        feed = open_feed(ahead=2)
        until(lambda: server.leases == 2)
        time.sleep(0.2)
        assert server.leases == 2
        taken(feed, 3)
        until(lambda: server.leases == 5)
        time.sleep(0.2)
        assert server.leases == 5

    def test_one_request_leases_all_that_a_step_lacks(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        feed = open_feed(ahead=2)
        feed.enter(on_wait=lambda reason, seconds: patience(seconds), note=lambda text: None)
        idle = itertools.count()

        def on_idle(seconds: float) -> None:
            patience(seconds)
            if next(idle) == 4:  # by now it asks for what the step needs
                known.extend(server.put(*batches(9)))

        known: list[str] = []
        assert ids(feed.take(7, version=0, on_idle=on_idle)) == known[:7]
        until(lambda: server.leases == 9)
        assert server.asked_for == [9]

    def test_what_cannot_be_used_is_asked_for_again(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        """Bad ones are no part of the step, nor of what is leased ahead."""
        bad, *good = batches(8)
        spoiled(bad, temperature=1e-300)
        known = server.put(*good[:2], bad, *good[2:])
        known.remove(bad.rollout.id)
        feed = open_feed(ahead=3)
        assert ids(taken(feed, 4)) == known[:4]
        until(lambda: server.leases == 8)
        assert server.asked("release") == [bad.rollout.id]
        assert ids(taken(feed, 3)) == known[4:]

    def test_what_on_idle_raises_ends_the_wait_and_gives_back(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(2))
        feed = open_feed()
        until(lambda: server.leases == 2)
        with pytest.raises(Enough):
            feed.take(3, version=0, on_idle=impatient)
        assert server.asked("release") == known and not server.tokens

    def test_a_refusal_is_raised_where_batches_are_taken(self, server: RefServer, open_feed: Any) -> None:
        server.refuses = True
        feed = open_feed()
        with pytest.raises(RefServerError):
            taken(feed, 1)

    def test_too_old_ones_are_given_back(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        """At version 9 with a lag of at most 4, version 5 is just young enough."""
        old, young = server.put(*batches(2, version=4)), server.put(*batches(2, version=5, first=2))
        feed = open_feed(max_lag=4)
        assert ids(taken(feed, 2, version=9)) == young
        assert server.asked("release") == old

    @pytest.mark.parametrize(
        ("lack", "loss"),
        [
            ("sampler_logps", {}),
            ("sampler_logps", {"old_logps": "recomputed", "importance_sampling_correction": "tis"}),
            ("ref_logps", {}),
            ("ref_logps", {"kl_in": "reward"}),
            ("step_rewards", {"advantage": "process"}),
        ],
    )
    def test_what_cannot_be_trained_on_is_given_back_with_the_reason(
        self, server: RefServer, open_feed: Any, batches: Any, lack: str, loss: dict[str, Any]
    ) -> None:
        """So that the server does not bring it again for ever."""
        good, bad = batches(2)
        if lack == "sampler_logps":
            object.__setattr__(bad.rollout, "sampler_logps", None)
        if lack == "step_rewards":
            steps = StepRewards(rewards=np.zeros(1, np.float32), ends=np.array([0]), counts=np.array([1, 0]))
            object.__setattr__(good.rollout, "steps", steps)
        server.put(bad, good)
        if lack == "ref_logps":
            server.bodies[bad.rollout.id] = wire.encode(bad.rollout)
        assert ids(taken(open_feed(loss=LossConfig.model_validate(loss)), 1)) == [good.rollout.id]
        (body,) = [body for verb, body, _ in server.calls if verb == "release"]
        assert [key["id"] for key in body["leases"]] == [bad.rollout.id] and lack in body["error"]

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            ({"group": ([3], [VOCABULARY, 5])}, "vocabulary"),
            ({"group": ([-1], [4, 5])}, "vocabulary"),
            ({"group": ([3] * CONTEXT, [4, 5])}, "context"),
            ({"temperature": 1e-300}, "temperature"),
            ({"rewards": (3e38, 0.0)}, "rewards"),
            ({"sampler_logps": (0.5, -1.0)}, "sampler_logps"),
            ({"ref_logps": (0.5, -1.0)}, "ref_logps"),
        ],
    )
    def test_a_batch_that_would_break_the_step_is_given_back(
        self, server: RefServer, open_feed: Any, batches: Any, spoil: dict[str, Any], reason: str
    ) -> None:
        """A server without a model may hand it out: nobody who uploads may end the run."""
        bad, good = batches(2)
        spoiled(bad, **spoil)
        server.put(bad, good)
        ledger = Ledger()
        assert ids(taken(open_feed(ledger), 1)) == [good.rollout.id]
        (body,) = [body for verb, body, _ in server.calls if verb == "release"]
        assert [key["id"] for key in body["leases"]] == [bad.rollout.id] and reason in body["error"]
        assert ledger.refused == 1

    def test_a_stop_is_heard_where_every_batch_is_bad(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        bad = batches(1)[0]
        spoiled(bad, group=([3], [VOCABULARY, 5]))
        server.put(bad)
        asked: list[float] = []

        def idle(seconds: float) -> None:
            asked.append(seconds)
            if len(asked) == 5:
                raise KeyboardInterrupt
            server.put(bad)  # there is always one more

        with pytest.raises(KeyboardInterrupt):
            open_feed().take(1, version=0, on_idle=idle)

    @pytest.mark.parametrize("old_logps", ["recomputed", "current"])
    def test_what_the_loss_does_not_need_may_be_lacking(
        self, server: RefServer, open_feed: Any, batches: Any, old_logps: str
    ) -> None:
        (batch,) = batches(1)
        object.__setattr__(batch.rollout, "sampler_logps", None)
        server.put(batch)
        server.bodies[batch.rollout.id] = wire.encode(batch.rollout)
        loss = LossConfig.model_validate({"beta": 0, "old_logps": old_logps})
        (leased,) = taken(open_feed(loss=loss), 1)
        assert isinstance(leased.batch, RolloutBatch)

    def test_without_a_limit_any_age_is_trained(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        known = server.put(*batches(1, version=0))
        assert ids(taken(open_feed(), 1, version=10**6)) == known


class TestLostLeases:
    def test_are_not_trained(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        """Lost before training begins, and then leased again: trained once, under the new lease."""
        known = server.put(*batches(2))
        feed = open_feed()
        until(lambda: server.leases == 2)
        server.lose(known[0])
        until(lambda: server.leases == 3)
        leased = taken(feed, 2)
        assert sorted(ids(leased)) == sorted(known)
        assert {lease.id: lease.token for lease in leased} == server.tokens

    def test_for_good_are_not_trained_either(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        known = server.put(*batches(2))
        feed = open_feed()
        until(lambda: server.leases == 2)
        server.forced[known[0]] = "stale"
        with pytest.raises(Enough):
            feed.take(2, version=0, on_idle=impatient)
        assert known[0] not in server.asked("release")

    @pytest.mark.parametrize("count", [2, 3, 4])
    def test_a_batch_that_was_leased_twice_is_trained_once(
        self, server: RefServer, open_feed: Any, batches: Any, count: int
    ) -> None:
        """A machine that slept: every lease is lost, and all batches come again while the old copies still wait."""
        known = server.put(*batches(4))
        feed = open_feed(ahead=20)
        until(lambda: server.leases == 4)
        server.lose(*known)
        until(lambda: server.leases == 8)
        trained: list[str] = []
        while len(trained) < 4:
            leased = taken(feed, min(count, 4 - len(trained)))
            assert all(server.tokens[lease.id] == lease.token for lease in leased)
            feed.trained(leased)
            trained += ids(leased)
        assert sorted(trained) == sorted(known)
        with pytest.raises(Enough):
            feed.take(1, version=0, on_idle=impatient)

    def test_old_and_new_copy_in_one_step_are_trained_once(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        """The server answers for each token; one of the two is good."""
        known = server.put(*batches(1))
        feed = open_feed()
        until(lambda: server.leases == 1)
        server.lose(*known)
        until(lambda: server.leases == 2)
        known += server.put(*batches(1, first=1))
        assert ids(taken(feed, 2)) == known

    def test_of_a_trained_batch_never_lead_to_an_ack_before_the_checkpoint(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        """The weights that hold its effect are not durable yet: a crash now must bring it again."""
        known = server.put(*batches(1))
        ledger = Ledger()
        feed = open_feed(ledger)
        feed.trained(taken(feed, 1))
        server.lose(*known)
        until(lambda: server.leases == 2)
        with pytest.raises(Enough):
            feed.take(1, version=1, on_idle=impatient)
        assert not server.done and ledger.ids() == known
        feed.settle(CHECKPOINT, ledger.ids())
        assert server.done == known and not ledger.ids()

    def test_while_training_bring_the_batch_again_but_it_is_not_trained_again(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(1))
        ledger = Ledger()
        feed = open_feed(ledger)
        leased = taken(feed, 1)
        server.lose(*known)
        until(lambda: server.leases == 2)
        time.sleep(0.1)  # it waits in the feed by now
        feed.trained(leased)
        with pytest.raises(Enough):
            feed.take(1, version=1, on_idle=impatient)
        assert not server.done
        feed.settle(CHECKPOINT, ledger.ids())
        assert server.done == known and not ledger.ids()

    def test_that_come_again_after_the_checkpoint_are_acked_untrained(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(1))
        ledger = Ledger()
        feed = open_feed(ledger)
        feed.trained(taken(feed, 1))
        with server.lock:
            del server.tokens[known[0]]
            feed_settles = threading.Thread(target=feed.settle, args=(CHECKPOINT, ledger.ids()))
            feed_settles.start()
        feed_settles.join()
        assert ledger.ids() == known, "its ack was stale"
        with server.lock:
            server.ready.append(known[0])
        until(lambda: server.done == known)
        until(lambda: not ledger.ids())
        with pytest.raises(Enough):
            feed.take(1, version=1, on_idle=impatient)


class TestInFlight:
    def test_settling_is_due_when_half_of_the_allowance_waits_for_it(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        """What an earlier life trained is no lease of ours, and so waits for nothing."""
        server.put(*batches(9))
        ledger = Ledger(["gone"])
        feed = open_feed(ledger, allowance=7)
        feed.trained(taken(feed, 3))
        assert (feed.unsettled, feed.settling_is_due) == (3, False)
        feed.trained(taken(feed, 1))
        assert (feed.unsettled, feed.settling_is_due) == (4, True)
        feed.settle(CHECKPOINT, ledger.ids())
        assert (feed.unsettled, feed.settling_is_due) == (0, False)

    @pytest.mark.parametrize(("allowance", "count", "ahead"), [(8, 4, 1), (8, 2, 2), (9, 3, 1), (2, 1, 1)])
    def test_settling_when_it_is_due_leaves_room_for_every_step(
        self, server: RefServer, open_feed: Any, batches: Any, allowance: int, count: int, ahead: int
    ) -> None:
        server.max_in_flight = allowance
        known = server.put(*batches(6 * count))
        ledger = Ledger()
        feed = open_feed(ledger, ahead=ahead, allowance=allowance)
        for version in range(6):
            feed.trained(taken(feed, count, version))
            if feed.settling_is_due:
                feed.settle(CHECKPOINT, ledger.ids())
        feed.settle(CHECKPOINT, ledger.ids())
        assert sorted(server.done) == sorted(known)


class TestLedger:
    def test_what_an_earlier_life_trained_is_acked_and_skipped(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(4))
        ledger = Ledger([known[0], known[2], "gone"])
        feed = open_feed(ledger)
        assert ids(taken(feed, 2)) == [known[1], known[3]]
        until(lambda: server.done == [known[0], known[2]] and ledger.ids() == ["gone"])

    def test_ids_that_the_server_has_as_done_leave_and_others_are_told(
        self, server: RefServer, open_feed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An earlier process acked them after the checkpoint that names them."""
        server.done = ["acked"]
        server.states = {"old": "expired"}
        ledger = Ledger(["acked", "lost", "old"])
        open_feed(ledger)
        until(lambda: ledger.ids() == ["lost", "old"])
        told = ""
        deadline = time.monotonic() + 60
        while "never acknowledged" not in told and time.monotonic() < deadline:
            told += capsys.readouterr().out
            time.sleep(0.01)
        assert "unknown=1" in told and "expired=1" in told

    def test_a_stale_ack_of_a_batch_that_is_done_leaves_the_ledger(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(1))
        ledger = Ledger(known)
        server.forced[known[0]] = "stale"
        server.states[known[0]] = "done"
        open_feed(ledger)
        until(lambda: not ledger.ids())

    def test_a_stale_ack_leaves_the_batch_in_the_ledger(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        known = server.put(*batches(1))
        ledger = Ledger(known)
        server.forced[known[0]] = "stale"
        open_feed(ledger)
        until(lambda: server.asked("ack") == known)
        time.sleep(0.1)
        assert ledger.ids() == known
        server.forced.clear()
        server.lose(*known)
        until(lambda: server.done == known and not ledger.ids())

    def test_settling_removes_what_was_acked_and_nothing_else(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(5))
        ledger = Ledger()
        feed = open_feed(ledger)
        feed.trained(taken(feed, 4))
        server.forced = {known[1]: "already", known[2]: "unknown", known[3]: "stale"}
        assert ledger.ids() == sorted(known[:4])
        feed.settle(CHECKPOINT, ledger.ids())
        assert ledger.ids() == known[2:4]
        assert server.done == [known[0]]
        verb, body, _ = server.calls[-1]
        assert verb == "ack" and body["checkpoint"] == "step-00000008"
        calls = len(server.calls)
        feed.settle(CHECKPOINT, ledger.ids())
        assert len(server.calls) == calls, "there is nothing left to say"

    def test_the_rest_is_acked_before_a_finished_run_ends(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(3))
        ledger = Ledger([*known[:2], "gone"])
        open_feed(ledger).settle_rest(check=lambda: None)
        assert server.done == known[:2]
        assert ledger.ids() == ["gone"], "which is not waited for: the server has nothing more to lease"


class TestClose:
    def test_gives_back_what_was_not_trained(self, server: RefServer, open_feed: Any, batches: Any) -> None:
        """One trained, one taken and not trained, the rest waiting: the trained one stays leased."""
        known = server.put(*batches(4))
        feed = open_feed(ahead=2)
        leased = taken(feed, 2)
        feed.trained(leased[:1])
        until(lambda: server.leases == 4)
        feed.close()
        assert sorted(server.asked("release")) == sorted(known[1:])
        assert list(server.tokens) == known[:1]
        assert not any(thread.is_alive() for thread in feed._threads)

    def test_with_nothing_held_says_nothing(self, server: RefServer, open_feed: Any) -> None:
        open_feed().close()
        assert not server.calls


class TestHeartbeat:
    def test_keeps_alive_what_waits_what_is_in_training_and_what_is_trained(
        self, server: RefServer, open_feed: Any, batches: Any
    ) -> None:
        known = server.put(*batches(3))
        feed = open_feed(lease_seconds=0.15)
        leased = taken(feed, 2)
        feed.trained(leased[:1])
        until(lambda: server.leases == 3)
        server.calls.clear()
        until(lambda: len(server.calls) >= 3)
        assert all(verb == "extend" and body["started"] is False for verb, body, _ in server.calls)
        assert sorted(key["id"] for key in server.calls[-1][1]["leases"]) == sorted(known)

    def test_forgets_what_is_lost(
        self, server: RefServer, open_feed: Any, batches: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known = server.put(*batches(2))
        feed = open_feed(lease_seconds=0.15)
        until(lambda: server.leases == 2)
        server.forced[known[0]] = "stale"
        until(lambda: server.calls and server.calls[-1][2] == {known[1]: "ok"})
        server.forced.clear()
        assert ids(taken(feed, 1)) == [known[1]]
        assert "leases were lost" in capsys.readouterr().out


@pytest.fixture
def stock() -> BatchBuffer:
    return BatchBuffer(ahead=2)


def named(*names: str) -> Any:
    """What waits is only passed on."""
    return names


def test_a_few_are_leased_ahead(stock: BatchBuffer) -> None:
    assert stock.lacking(0) == 2 and not stock.full
    stock.add(named("a"))
    assert stock.lacking(0) == 1
    stock.add(named("b"))
    assert stock.lacking(0) == 0 and stock.full


def test_a_step_lacks_what_it_needs_and_the_few(stock: BatchBuffer) -> None:
    assert stock.take(5, timeout=0) is None
    assert stock.lacking(0) == 7
    stock.add(named(*"abcdefg"))
    assert stock.full
    assert [stock.take(needed, timeout=0) for needed in (5, 4, 3, 2, 1)] == list("abcde")
    assert stock.full, "two wait for the next step"


def test_what_was_put_back_is_the_next_in_its_order(stock: BatchBuffer) -> None:
    stock.add(named("a", "b", "c"))
    taken: list[Any] = [stock.take(1, timeout=0), stock.take(1, timeout=0)]
    stock.put_back(taken)
    assert [stock.take(1, timeout=0) for _ in range(3)] == ["a", "b", "c"]


def test_what_was_taken_in_vain_is_lacking_again(stock: BatchBuffer) -> None:
    stock.add(named("bad", "good"))
    assert [stock.take(1, timeout=0), stock.take(1, timeout=0)] == ["bad", "good"]
    assert stock.lacking(0) == 2


def test_a_taker_waits_for_what_comes_and_a_lessor_for_room(stock: BatchBuffer) -> None:
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.append(stock.take(1, timeout=60)))
    taker.start()
    while stock.lacking(60) < 3:
        pass  # until it needs one
    stock.add(named("a", "b", "c"))
    taker.join(60)
    assert taken == ["a"]
    room: list[int] = []
    lessor = threading.Thread(target=lambda: room.append(stock.lacking(60)))
    lessor.start()
    stock.take(3, timeout=0)
    lessor.join(60)
    assert room and room[0] >= 3
