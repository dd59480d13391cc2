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
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.queue_client.feed import LeaseFeed
from policy_trainer.trainer.queue_client.ledger import Ledger
from policy_trainer.trainer.queue_client.terms import BatchCheck, LeaseTerms
from shared import wire
from shared.api import Lease
from shared.batch import TokenGroup
from shared.client import RefServerClient, RefServerError
from tests.harness.processes import until

CHECKPOINT = Path("checkpoints/step-00000008")
VOCABULARY, CONTEXT = 100, 50


class RefServer:
    """Leases as API.md has them, kept in dictionaries. `lose` is what time does to a lease.

    No more than `max_in_flight` are out at once.
    """

    def __init__(self, open_site: Callable[..., Any], make_scored: Callable[..., Any]) -> None:
        self.make_scored = make_scored
        self.numbers = itertools.count()
        self.lock = threading.RLock()
        self.bodies: dict[str, bytes] = {}
        self.ready: list[str] = []
        self.tokens: dict[str, str] = {}
        self.done: list[str] = []
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.forced: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.leases = 0
        self.counts: list[int] = []  # of the requests that got batches
        self.max_in_flight = 100
        self.refuses = False
        self.taken_for: float | None = None
        self.finished: list[tuple[str, Any]] = []
        self.site = open_site(self.respond)

    def batch(self, version: int = 0) -> Any:
        return self.make_scored([3], [[4], [5]], [0.0, 1.0], version=version, number=next(self.numbers))

    def put(self, *batches: Any, count: int = 0, version: int = 0) -> list[str]:
        """These batches and so many new ones. Returns their ids."""
        batches = (*batches, *(self.batch(version) for _ in range(count)))
        with self.lock:
            for batch in batches:
                self.bodies[batch.id] = wire.encode(batch)
                self.ready.append(batch.id)
        return [batch.id for batch in batches]

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
                self.counts.append(body["count"])
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

    def ids_of(self, verb: str) -> list[str]:
        """Ids in all calls of a verb, in order."""
        with self.lock:
            return [key["id"] for name, body, _ in self.calls if name == verb for key in body["leases"]]


@pytest.fixture
def server(open_site: Callable[..., Any], make_scored: Callable[..., Any]) -> RefServer:
    return RefServer(open_site, make_scored)


@pytest.fixture
def open_feed(server: RefServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeaseFeed]]:
    monkeypatch.setattr("policy_trainer.trainer.queue_client.terms._ASK_SECONDS", 0.02)
    monkeypatch.setattr("policy_trainer.trainer.queue_client.feed._LOOK_SECONDS", 0.1)
    opened: list[tuple[LeaseFeed, RefServerClient]] = []

    def make(
        ledger: Ledger | None = None,
        *,
        ahead: int = 4,
        max_lag: int | None = None,
        lease_seconds: float = 60,
        allowance: int = 100,
        version: int = 0,
    ) -> LeaseFeed:
        client = RefServerClient(server.site.url, patience=None)
        terms = LeaseTerms("trainer", "test", epoch=0, max_lag=max_lag, lease_seconds=lease_seconds)
        ledger = Ledger() if ledger is None else ledger
        intake = BatchCheck(LossConfig(), VOCABULARY, CONTEXT)
        feed = LeaseFeed(client, terms, ledger, intake, ahead=ahead, allowance=allowance, version=version)
        opened.append((feed, client))
        return feed

    yield make
    for feed, client in opened:
        server.refuses = False
        feed.close()
        client.close()


def spoiled(batch: Any, **values: Any) -> None:
    """Gives a batch values that its constructor refuses. group: a prompt and completions of one token each."""
    for name, value in values.items():
        if name == "group":
            prompt, completions = (np.array(ids, np.int64) for ids in value)
            value = TokenGroup(prompt, completions, np.ones(len(completions), np.int64))
        elif isinstance(value, tuple):
            value = np.array(value, np.float32)
        object.__setattr__(batch, name, value)


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


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


class TestEnter:
    """Nothing of a run may be published before the server leases to it."""

    def test_waits_until_the_other_trainer_is_taken_for_gone(self, server: RefServer, open_feed: Any) -> None:
        server.taken_for = 30
        notes: list[str] = []

        def on_wait(reason: str, seconds: float) -> None:
            patience(seconds)
            if notes:
                assert notes == [reason]
                server.taken_for = None

        open_feed().enter(on_wait=on_wait, note=notes.append)
        assert "waiting up to 30 s to see whether it lives" in notes[0]

    def test_another_trainer_that_lives_ends_the_wait(self, server: RefServer, open_feed: Any) -> None:
        server.taken_for = 30

        def on_wait(reason: str, seconds: float) -> None:
            patience(seconds)
            server.taken_for = 60  # it has asked again

        with pytest.raises(RunFailed, match="run: another trainer trains a run named 'test'"):
            open_feed().enter(on_wait=on_wait, note=lambda text: None)

    def test_a_run_that_another_trainer_takes_fails_at_the_next_step(self, server: RefServer, open_feed: Any) -> None:
        feed = open_feed()
        feed.enter(on_wait=lambda reason, seconds: patience(seconds), note=lambda text: None)
        server.taken_for = 30
        with pytest.raises(RunFailed, match="has taken it from this one"):
            taken(feed, 1)


class TestTake:
    def test_in_order_and_marked_as_started(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=5)
        feed = open_feed()
        assert ids(taken(feed, 3)) == known[:3]
        verb, body, _ = server.calls[-1]
        assert verb == "extend" and body["started"] is True and body["lease_seconds"] == 60
        assert [key["id"] for key in body["leases"]] == known[:3]
        assert ids(taken(feed, 2)) == known[3:]

    def test_batches_put_back_come_again_first_and_in_order(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=3)
        feed = open_feed()
        feed.put_back([replace(lease, batch=lease.batch) for lease in taken(feed, 2)])  # scored again
        assert ids(taken(feed, 3)) == known
        assert server.ids_of("release") == []

    def test_waits_for_later_batches(self, server: RefServer, open_feed: Any) -> None:
        feed, waited = open_feed(), []

        def on_idle(seconds: float) -> None:
            patience(seconds)
            waited.append(seconds)
            if len(waited) == 2:
                server.put(count=2)

        assert len(feed.take(2, version=0, on_idle=on_idle)) == 2
        assert len(waited) == 2 and 0.08 < waited[0] < waited[1]

    def test_leases_only_a_few_ahead(self, server: RefServer, open_feed: Any) -> None:
        server.put(count=9)
        feed = open_feed(ahead=2)
        for leases, then in ((2, 3), (5, 1)):
            until(lambda leases=leases: server.leases == leases)
            time.sleep(0.2)
            assert server.leases == leases
            taken(feed, then)

    def test_the_last_step_leases_nothing_in_advance(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=5)
        feed = open_feed(ahead=2)
        until(lambda: server.leases == 2)
        assert ids(feed.take(3, version=0, on_idle=patience, last=True)) == known[:3]
        time.sleep(0.2)
        assert server.leases == 3, "no long poll is left that `close` would wait for"

    def test_one_request_leases_all_that_a_step_lacks(self, server: RefServer, open_feed: Any) -> None:
        feed = open_feed(ahead=2)
        feed.enter(on_wait=lambda reason, seconds: patience(seconds), note=lambda text: None)
        idle, known = itertools.count(), []

        def on_idle(seconds: float) -> None:
            patience(seconds)
            if next(idle) == 4:  # by now it asks for what the step needs
                known.extend(server.put(count=9))

        assert ids(feed.take(7, version=0, on_idle=on_idle)) == known[:7]
        until(lambda: server.leases == 9)
        assert server.counts == [9]

    def test_an_exception_while_waiting_releases_the_batches(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=2)
        feed = open_feed()
        until(lambda: server.leases == 2)
        with pytest.raises(Enough):
            feed.take(3, version=0, on_idle=impatient)
        assert server.ids_of("release") == known and not server.tokens

    def test_a_refused_request_raises(self, server: RefServer, open_feed: Any) -> None:
        server.refuses = True
        with pytest.raises(RefServerError):
            taken(open_feed(), 1)

    def test_batches_that_are_too_old_are_released(self, server: RefServer, open_feed: Any) -> None:
        """At version 9 with a lag of at most 4, version 5 is just young enough."""
        old, young = server.put(count=2, version=4), server.put(count=2, version=5)
        assert ids(taken(open_feed(max_lag=4), 2, version=9)) == young
        assert server.ids_of("release") == old

    def test_without_a_lag_they_come_in_the_order_of_their_problems_each_once(
        self, server: RefServer, open_feed: Any
    ) -> None:
        """A worker that is started again samples problem 1 again. What another program sampled has no index."""
        batches = [server.batch(version=3) for _ in range(6)]
        for batch, index in zip(batches, (2, 1, None, 1, None, 0), strict=True):
            spoiled(batch, index=index)
        known = server.put(*batches)
        feed = open_feed(max_lag=0)
        assert ids(taken(feed, 5, version=3)) == [known[5], known[1], known[0], *sorted((known[2], known[4]))]
        assert not server.ids_of("release")  # released at once, the batch would come again and again
        later = server.put(count=1, version=4)
        assert ids(taken(feed, 1, version=4)) == later and server.ids_of("release") == [known[3]]

    def test_without_a_limit_any_age_is_trained(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=1)
        assert ids(taken(open_feed(), 1, version=10**6)) == known


class TestRefused:
    """A server without a model may hand out any batch, and nobody who uploads may end the run."""

    @staticmethod
    def assert_refused(server: RefServer, id: str, reason: str) -> None:
        (body,) = [body for verb, body, _ in server.calls if verb == "release"]
        assert [key["id"] for key in body["leases"]] == [id] and reason in body["error"]

    def test_a_version_that_does_not_exist_yet(self, server: RefServer, open_feed: Any) -> None:
        bad, good = server.put(server.batch(version=4), server.batch(version=3))
        assert ids(taken(open_feed(version=3), 1, version=3)) == [good]
        self.assert_refused(server, bad, "policy_version 4, but this run has made 3 steps")

    def test_a_missing_input(self, server: RefServer, open_feed: Any) -> None:
        good, bad = server.batch(), server.batch()
        server.put(bad, good)
        server.bodies[bad.id] = wire.encode(bad.without_scores())  # not scored
        assert ids(taken(open_feed(), 1)) == [good.id]
        self.assert_refused(server, bad.id, "ref_logps")

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
    def test_values_that_would_break_the_step(
        self, server: RefServer, open_feed: Any, ledger: Ledger, spoil: dict[str, Any], reason: str
    ) -> None:
        bad, good = server.batch(), server.batch()
        spoiled(bad, **spoil)
        server.put(bad, good)
        assert ids(taken(open_feed(ledger), 1)) == [good.id]
        self.assert_refused(server, bad.id, reason)
        assert ledger.refused == 1

    def test_a_stop_is_noticed_where_every_batch_is_bad(self, server: RefServer, open_feed: Any) -> None:
        bad = server.batch()
        spoiled(bad, group=([3], [VOCABULARY, 5]))
        server.put(bad)
        idle = itertools.count(1)

        def on_idle(seconds: float) -> None:
            if next(idle) == 5:
                raise KeyboardInterrupt
            server.put(bad)  # there is always another

        with pytest.raises(KeyboardInterrupt):
            open_feed().take(1, version=0, on_idle=on_idle)

    @pytest.mark.parametrize("field", ["run", "lineage"])
    def test_a_server_that_mixes_runs_ends_the_run(self, server: RefServer, open_feed: Any, field: str) -> None:
        batch = server.batch()
        server.put(replace(batch, **{field: "other"}))
        with pytest.raises(RunFailed, match=f"{field} 'other'"):
            taken(open_feed(), 1)


class TestLostLeases:
    def test_a_lost_lease_is_not_trained(self, server: RefServer, open_feed: Any) -> None:
        """Lost before training begins, and then leased again: trained once, under the new lease."""
        known = server.put(count=2)
        feed = open_feed()
        until(lambda: server.leases == 2)
        server.lose(known[0])
        until(lambda: server.leases == 3)
        leased = taken(feed, 2)
        assert sorted(ids(leased)) == sorted(known)
        assert {lease.id: lease.token for lease in leased} == server.tokens

    def test_a_lease_that_is_lost_for_good_is_not_trained(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=2)
        feed = open_feed()
        until(lambda: server.leases == 2)
        server.forced[known[0]] = "stale"
        with pytest.raises(Enough):
            feed.take(2, version=0, on_idle=impatient)
        assert known[0] not in server.ids_of("release")

    @pytest.mark.parametrize("count", [2, 3])
    def test_a_batch_that_was_leased_twice_is_trained_once(self, server: RefServer, open_feed: Any, count: int) -> None:
        """A suspended machine: every lease is lost, and all batches come again while the old copies still wait."""
        known = server.put(count=4)
        feed = open_feed(ahead=20)
        until(lambda: server.leases == 4)
        server.lose(*known)
        until(lambda: server.leases == 8)
        trained: list[str] = []
        while len(trained) < 4:
            leased = taken(feed, min(count, 4 - len(trained)))
            assert all(server.tokens[lease.id] == lease.token for lease in leased)
            feed.ledger.mark_trained(leased)
            trained += ids(leased)
        assert sorted(trained) == sorted(known)
        with pytest.raises(Enough):
            feed.take(1, version=0, on_idle=impatient)

    def test_old_and_new_lease_in_one_step(self, server: RefServer, open_feed: Any) -> None:
        """The server answers for each token; one of the two is good."""
        known = server.put(count=1)
        feed = open_feed()
        until(lambda: server.leases == 1)
        server.lose(*known)
        until(lambda: server.leases == 2)
        known += server.put(count=1)
        assert ids(taken(feed, 2)) == known

    @pytest.mark.parametrize("lost", ["before it is trained", "after it is trained"])
    def test_a_batch_that_comes_again_is_acked_after_the_checkpoint_and_not_trained_again(
        self, server: RefServer, open_feed: Any, ledger: Ledger, lost: str
    ) -> None:
        """The weights that hold its effect are not durable before: a crash until then must bring it again."""
        known = server.put(count=1)
        feed = open_feed(ledger)
        leased = taken(feed, 1)
        if lost == "after it is trained":
            feed.ledger.mark_trained(leased)
        server.lose(*known)
        until(lambda: server.leases == 2)
        if lost == "before it is trained":
            time.sleep(0.1)  # it waits in the feed by now
            feed.ledger.mark_trained(leased)
        with pytest.raises(Enough):
            feed.take(1, version=1, on_idle=impatient)
        assert not server.done and ledger.ids() == known
        feed.settle(CHECKPOINT, ledger.ids())
        assert server.done == known and not ledger.ids()

    def test_a_batch_that_comes_again_after_the_checkpoint_is_acked_untrained(
        self, server: RefServer, open_feed: Any, ledger: Ledger
    ) -> None:
        known = server.put(count=1)
        feed = open_feed(ledger)
        feed.ledger.mark_trained(taken(feed, 1))
        with server.lock:
            del server.tokens[known[0]]
        feed.settle(CHECKPOINT, ledger.ids())
        assert ledger.ids() == known, "its ack was stale"
        with server.lock:
            server.ready.append(known[0])
        until(lambda: server.done == known and not ledger.ids())
        with pytest.raises(Enough):
            feed.take(1, version=1, on_idle=impatient)


class TestSettling:
    def test_is_due_when_half_of_the_allowance_waits_for_it(self, server: RefServer, open_feed: Any) -> None:
        """An earlier process's batches are not leased now, and so do not count."""
        server.put(count=9)
        ledger = Ledger(["gone"])
        feed = open_feed(ledger, allowance=7)
        feed.ledger.mark_trained(taken(feed, 3))
        assert (feed.ledger.unsettled, feed.settling_is_due) == (3, False)
        feed.ledger.mark_trained(taken(feed, 1))
        assert (feed.ledger.unsettled, feed.settling_is_due) == (4, True)
        feed.settle(CHECKPOINT, ledger.ids())
        assert (feed.ledger.unsettled, feed.settling_is_due) == (0, False)

    @pytest.mark.parametrize(("allowance", "count"), [(8, 4), (9, 3)])
    def test_when_it_is_due_leaves_room_for_every_step(
        self, server: RefServer, open_feed: Any, ledger: Ledger, allowance: int, count: int
    ) -> None:
        server.max_in_flight = allowance
        known = server.put(count=6 * count)
        feed = open_feed(ledger, ahead=1, allowance=allowance)
        for version in range(6):
            feed.ledger.mark_trained(taken(feed, count, version))
            if feed.settling_is_due:
                feed.settle(CHECKPOINT, ledger.ids())
        feed.settle(CHECKPOINT, ledger.ids())
        assert sorted(server.done) == sorted(known)

    def test_removes_only_ids_that_the_server_confirms(self, server: RefServer, open_feed: Any, ledger: Ledger) -> None:
        known = server.put(count=5)
        feed = open_feed(ledger)
        feed.ledger.mark_trained(taken(feed, 5))
        server.forced = {known[1]: "already", known[2]: "unknown", known[3]: "stale", known[4]: "stale"}
        server.states[known[4]] = "done"  # under an earlier lease
        feed.settle(CHECKPOINT, ledger.ids())
        assert ledger.ids() == known[2:4]
        assert server.done == [known[0]]
        verb, body, _ = server.calls[-1]
        assert verb == "ack" and body["checkpoint"] == "step-00000008"
        calls = len(server.calls)
        feed.settle(CHECKPOINT, ledger.ids())
        assert len(server.calls) == calls, "there is nothing left to ack"


class TestResumed:
    """The ledger of a checkpoint names batches that an earlier process trained."""

    def test_they_are_acked_and_not_trained_again(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=4)
        ledger = Ledger([known[0], known[2], "gone"])
        assert ids(taken(open_feed(ledger), 2)) == [known[1], known[3]]
        until(lambda: server.done == [known[0], known[2]] and ledger.ids() == ["gone"])

    def test_ids_that_are_done_leave_the_ledger_and_others_are_logged(
        self, server: RefServer, open_feed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.done = ["acked"]
        server.states = {"old": "expired"}
        ledger = Ledger(["acked", "lost", "old"])
        open_feed(ledger)
        until(lambda: ledger.ids() == ["lost", "old"])
        output: list[str] = []
        until(lambda: output.append(capsys.readouterr().out) or "never acknowledged" in "".join(output))
        assert "unknown=1" in "".join(output) and "expired=1" in "".join(output)

    def test_the_rest_is_acked_before_a_finished_run_ends(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=3)
        ledger = Ledger([*known[:2], "gone"])
        open_feed(ledger).settle_rest(check=lambda: None)
        assert server.done == known[:2]
        assert ledger.ids() == ["gone"], "which is not waited for: the server has nothing more to lease"


class TestClose:
    def test_releases_what_was_not_trained(self, server: RefServer, open_feed: Any) -> None:
        """One trained, one taken and not trained, the rest waiting: the trained one stays leased."""
        known = server.put(count=4)
        feed = open_feed(ahead=2)
        leased = taken(feed, 2)
        feed.ledger.mark_trained(leased[:1])
        until(lambda: server.leases == 4)
        feed.close()
        assert sorted(server.ids_of("release")) == sorted(known[1:])
        assert list(server.tokens) == known[:1]
        assert not {"leases", "heartbeat", "old ids"} & {thread.name for thread in threading.enumerate()}

    def test_a_finished_run_ends_after_its_leases(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=2)
        feed = open_feed()
        until(lambda: server.leases == 2)
        feed.finish()
        assert sorted(server.ids_of("release")) == sorted(known)
        assert server.finished == [("/v1/runs/test/finish", {})]


class TestHeartbeat:
    def test_extends_waiting_taken_and_trained_batches(self, server: RefServer, open_feed: Any) -> None:
        known = server.put(count=3)
        feed = open_feed(lease_seconds=0.15)
        leased = taken(feed, 2)
        feed.ledger.mark_trained(leased[:1])
        until(lambda: server.leases == 3)
        server.calls.clear()
        until(lambda: len(server.calls) >= 3)
        assert all(verb == "extend" and body["started"] is False for verb, body, _ in server.calls)
        assert sorted(key["id"] for key in server.calls[-1][1]["leases"]) == sorted(known)

    def test_forgets_lost_leases(self, server: RefServer, open_feed: Any, capsys: pytest.CaptureFixture[str]) -> None:
        known = server.put(count=2)
        feed = open_feed(lease_seconds=0.15)
        until(lambda: server.leases == 2)
        server.forced[known[0]] = "stale"
        until(lambda: server.calls and server.calls[-1][2] == {known[1]: "ok"})
        server.forced.clear()
        assert ids(taken(feed, 1)) == [known[1]]
        assert "leases were lost" in capsys.readouterr().out
