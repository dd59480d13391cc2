"""/metrics: after work, in trouble, and within bounds."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.queue.records import Stats
from ref_server.service import gauges
from shared.api import Depth, State
from tests.harness.processes import until
from tests.ref_server.calls import MakeService, Rollout, Serve, lease, lease_key, settle, upload

Labels = frozenset[tuple[str, str]]


def scrape(http: httpx.Client) -> dict[tuple[str, Labels], float]:
    """Samples by name and labels, after checking what Prometheus would refuse."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    assert all(len(family.documentation) > 10 for family in families)
    samples = [(sample.name, frozenset(sample.labels.items()), sample.value) for f in families for sample in f.samples]
    values = {(name, labels): value for name, labels, value in samples}
    assert len(values) == len(samples)
    return values


def labels(**values: str) -> Labels:
    return frozenset(values.items())


@pytest.fixture
def small(make_service: MakeService, serve: Serve) -> Iterator[httpx.Client]:
    """A server with room for one batch of each of two runs that waits, and one in flight."""
    with serve(make_service(queue={"max_batches": 3, "max_in_flight": 2})) as http:
        yield http


def test_a_server_that_has_seen_work(small: httpx.Client, rollout: Rollout) -> None:
    first, second = rollout(run="a"), rollout(run="b")
    assert [upload(small, batch).status_code for batch in (first, first, second, rollout())] == [201, 200, 201, 429]
    until(lambda: scrape(small).get(("tandem_batches", labels(run="b", state="ready"))) == 1)  # the one scored last
    key = lease_key(lease(small))
    assert lease(small, wait_seconds=0).status_code == 429
    settle(small, "release", [key])
    settle(small, "ack", [lease_key(lease(small, wait_seconds=0))])
    small.post("/v1/logprobs", json={"prompt_ids": [1, 2], "completions": [[3], [4, 5]]})

    seen = scrape(small)
    expected = {
        ("tandem_batches", labels(run="a", state="done")): 1,
        ("tandem_batches", labels(run="b", state="ready")): 1,
        ("tandem_waiting_batches", labels()): 1,
        ("tandem_limit_in_flight_batches", labels(scope="all")): 2,
        ("tandem_limit_in_flight_batches", labels(scope="run")): 1,
        ("tandem_uploads_total", labels(outcome="admitted")): 2,
        ("tandem_uploads_total", labels(outcome="duplicate")): 1,
        ("tandem_leases_total", labels()): 2,
        ("tandem_redeliveries_total", labels()): 1,
        ("tandem_lease_ends_total", labels(how="acked")): 1,
        ("tandem_lease_ends_total", labels(how="released")): 1,
        ("tandem_http_errors_total", labels(status="429", code="queue_full")): 1,
        ("tandem_http_errors_total", labels(status="429", code="in_flight_full")): 1,
        ("tandem_http_requests_total", labels(route="/v1/batches", method="POST", status="201")): 2,
        ("tandem_http_request_seconds_count", labels(route="/v1/batches", method="POST")): 4,
        ("tandem_http_requests_active", labels()): 1,
        ("tandem_scored_tokens_total", labels(device="cpu")): first.group.tokens + second.group.tokens,
        ("tandem_direct_scored_tokens_total", labels(device="cpu")): 5,
        ("tandem_score_seconds_count", labels(device="cpu")): 2,
        ("tandem_admission_to_ready_seconds_count", labels()): 2,
        ("tandem_ready", labels()): 1,
        ("tandem_store_up", labels()): 1,
    }
    assert {sample: seen[sample] for sample in expected} == expected
    stored = seen["tandem_batch_bytes", labels(run="b", state="ready")]
    assert seen["tandem_waiting_bytes", labels()] == seen["tandem_stored_bytes", labels()] == stored
    assert 2 <= seen["tandem_forward_seconds_count", labels(device="cpu")] <= 3
    assert seen["tandem_commit_operations_sum", labels()] >= seen["tandem_commit_operations_count", labels()] >= 3
    for name in ("tandem_disk_free_bytes", "tandem_oldest_waiting_seconds", "process_resident_memory_bytes"):
        assert seen[name, labels()] > 0

    since_start = small.get("/v1/queue").json()["since_start"]
    assert (since_start["admitted"], since_start["duplicate"], since_start["acked"]) == (2, 1, 1)


def test_batches_that_expired_are_counted_by_reason(http: httpx.Client, rollout: Rollout, run: str) -> None:
    def expired(reason: str) -> float:
        return scrape(http)["tandem_expired_batches_total", labels(reason=reason)]

    stale, abandoned = expired("stale"), expired("abandoned")
    batch = rollout(run=run)
    upload(http, batch)
    while http.get(f"/v1/batches/{batch.id}").json()["state"] != "expired":  # it may be in scoring
        lease(http, run, epoch=0, policy_version=9, max_lag=1, wait_seconds=0)
    assert (expired("stale") - stale, expired("abandoned") - abandoned) == (1, 0)


class Failing:
    """A queue some of whose methods do something else, and the rest what the real one does."""

    def __init__(self, queue: Queue, **instead: Callable[[], Any]) -> None:
        self._queue = queue
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name) or getattr(self._queue, name)


def fail(error: Exception) -> Callable[[], Any]:
    def failing() -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("instead", "depths"),
    [
        ({"check": fail(StorageBroken("gone")), "stats": fail(StorageBroken("gone"))}, False),
        ({"stats": fail(StorageBroken("gone"))}, False),
        ({"check": fail(StorageFull("no room"))}, True),
    ],
)
def test_a_failing_store_is_reported(
    make_service: MakeService, serve: Serve, instead: dict[str, Callable[[], Any]], depths: bool
) -> None:
    with serve(make_service(wrap=lambda queue: Failing(queue, **instead))) as http:
        seen = scrape(http)
    assert seen["tandem_store_up", labels()] == seen["tandem_ready", labels()] == 0
    assert (("tandem_waiting_batches", labels()) in seen) == depths
    assert seen["tandem_scoring_alive", labels()] == 1
    assert ("tandem_leases_total", labels()) in seen


def test_a_store_that_does_not_answer_delays_no_scrape(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.http.routes.monitoring.TIMEOUT", 0.1)
    answer, checks = threading.Event(), []

    def check() -> None:
        checks.append(True)
        answer.wait(30)

    with serve(make_service(wrap=lambda queue: Failing(queue, check=check))) as http:
        assert [scrape(http)["tandem_store_up", labels()] for _ in range(5)] == [0.0] * 5
        assert len(checks) == 1, "later scrapes start no other thread"
        answer.set()
        monkeypatch.setattr("ref_server.http.routes.monitoring.TIMEOUT", 20.0)
        assert scrape(http)["tandem_store_up", labels()] == 1


def test_clients_make_no_labels(http: httpx.Client) -> None:
    before = {key for key in scrape(http) if key[0].startswith("tandem_http")}
    for number in range(30):
        http.get(f"/nowhere/{number}")
        http.get(f"/v1/batches/{number}")
        http.request("BREW", f"/v1/batches?x={number}")
        http.get("/livez", headers={"Host": f"evil-{number}.example"})
    after = {key for key in scrape(http) if key[0].startswith("tandem_http_requests")}
    new = {tuple(sorted(values)) for _, values in after - before}
    assert len(new) <= 5
    assert {dict(values)["route"] for values in new} <= {"unmatched", "/v1/batches", "/v1/batches/{id}", "/livez"} | {
        "/metrics"
    }


def depths_of(runs: dict[str, dict[State, Depth]]) -> dict[tuple[str, Labels], float]:
    stats = Stats(runs, oldest_age=None, waiting_batches=0, waiting_bytes=0)
    samples = [sample for family in gauges.depths(stats) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def test_runs_beyond_the_bound_are_summed() -> None:
    finished = {f"finished {n:03}": {State.DONE: Depth(batches=1000, bytes=0)} for n in range(150)}
    alive = {f"alive {n:03}": {State.READY: Depth(batches=n + 1, bytes=10)} for n in range(120)}
    seen = depths_of(finished | alive)
    runs = {dict(values)["run"] for name, values in seen if name == "tandem_batches"}
    assert len(runs) == gauges.MAX_RUNS + 1
    assert "alive 119" in runs
    assert "alive 019" not in runs
    assert not any(run.startswith("finished") for run in runs)
    assert seen["tandem_batches", labels(run="other", state="ready")] == sum(range(1, 21))
    assert seen["tandem_batch_bytes", labels(run="other", state="ready")] == 200
    assert seen["tandem_batches", labels(run="other", state="done")] == 150_000


def test_many_checks_of_readiness_flush_the_disk_once(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.http.routes.monitoring._FRESH_SECONDS", 3600.0)
    checks: list[None] = []
    with serve(make_service(wrap=lambda queue: Failing(queue, check=lambda: checks.append(None)))) as http:
        assert {http.get("/readyz").status_code for _ in range(20)} == {200}
    assert len(checks) == 1
