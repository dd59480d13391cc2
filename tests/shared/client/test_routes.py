"""The client against a real server: every method, and many threads."""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from ref_server.service.service import Service
from shared import wire
from shared.api import Kind, LeaseBody, Outcome, PurgeBody, Purged, State
from shared.batch import Batch, Training
from shared.client import Leased, RefServerClient, RefServerError
from shared.client.credentials import remedy
from tests.ref_server.conftest import make_service, model, one_thread, rollout, serve, tokenizer

__all__ = ["make_service", "model", "one_thread", "rollout", "serve", "tokenizer"]

Rollout = Callable[..., Batch]

NUMBERS = count()
UNKNOWN = "00000000-0000-7000-8000-000000000000"


@pytest.fixture(scope="module")
def url(
    make_service: Callable[..., Service],
    serve: Callable[[Service], AbstractContextManager[httpx.Client]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    with serve(make_service(snapshot_root=tmp_path_factory.mktemp("snapshots"))) as http:
        yield str(http.base_url)


@pytest.fixture
def client(connect: Callable[..., Any], url: str) -> Any:
    return connect(url)


@pytest.fixture
def run() -> str:
    """A run of the test's own, so that tests share a server."""
    return f"run-{next(NUMBERS)}"


def terms(run: str, wait_seconds: float = 15) -> LeaseBody:
    return LeaseBody(consumer="tester", run=run, wait_seconds=wait_seconds)


def test_a_role_is_checked_without_a_lease(client: Any, connect: Callable[..., Any], open_site: Any) -> None:
    client.check_train_role()
    error = {"code": "forbidden", "message": "this needs a token of role train; yours is of role upload"}
    site = open_site(lambda _: site.answer(403, json.dumps({"error": error}).encode()))
    with pytest.raises(RefServerError) as refused:
        connect(site.url).check_train_role()
    (request,) = site.requests
    assert (request.path, json.loads(request.body)["leases"]) == ("/v1/leases/extend", [])
    assert "--token-file" in remedy(refused.value, "POLICY_TRAINER_")


def test_the_role_of_replacing_the_reference_is_checked_without_a_snapshot(
    client: Any, connect: Callable[..., Any], open_site: Any
) -> None:
    before = client.model()
    client.check_reference_role()
    assert client.model() == before
    error = {"code": "forbidden", "message": "this needs a token of role admin; yours is of role train"}
    site = open_site(lambda _: site.answer(403, json.dumps({"error": error}).encode()))
    with pytest.raises(RefServerError, match="role admin"):
        connect(site.url).check_reference_role()
    assert [(request.method, request.path) for request in site.requests] == [("PUT", "/v1/reference")]


def test_a_batch_on_its_way(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    first, again = client.upload(batch), client.upload(wire.encode(batch))
    assert (first.id, first.created, again.created) == (batch.id, True, False)
    leased = client.lease(terms(run))
    assert leased.batch.ref_logps is not None
    assert (leased.id, leased.deliveries, leased.batch.group.tokens) == (batch.id, 1, batch.group.tokens)
    assert client.extend([leased], 60, started=True) == {batch.id: Outcome.OK}
    assert client.queue().runs[run][State.LEASED].batches == 1
    assert list(client.queue(run).runs) == [run] and list(client.glance(run).runs) == [run]
    assert client.queue("another").runs == {}
    assert client.ack([leased], "step-8") == {batch.id: Outcome.OK}
    assert client.ack([leased]) == {batch.id: Outcome.ALREADY}
    stranger = Leased(leased.batch, batch.id, "another token", 1)
    assert client.extend([stranger], 60) == {batch.id: Outcome.STALE}
    details = client.batch(batch.id)
    assert details.state is State.DONE
    assert "step-8" in details.history[-1].detail
    assert client.lease(terms(run, wait_seconds=0)) is None


def test_leases_of_several_batches_in_one_request(client: Any, rollout: Rollout, run: str) -> None:
    sent = [rollout(run=run) for _ in range(3)]
    for batch in sent:
        client.upload(batch)
    request = terms(run).model_copy(update={"count": 2, "request_id": f"request of {run}"})
    held: list[Leased] = []
    while len(held) < 3:  # as many as are scored by now
        held += client.lease_many(terms(run).model_copy(update={"count": 3 - len(held)}))
    assert [(each.id, each.deliveries) for each in held] == [(batch.id, 1) for batch in sent]
    assert all(each.batch.ref_logps is not None for each in held)
    client.release(held)
    first, again = client.lease_many(request), client.lease_many(request)
    assert [(each.id, each.token) for each in first] == [(each.id, each.token) for each in again]
    assert [each.id for each in first] == [batch.id for batch in sent[:2]]
    assert set(client.ack(first).values()) == {Outcome.OK}
    assert [each.id for each in client.lease_many(terms(run))] == [sent[2].id], "without a count one"
    assert client.lease_many(terms(run, wait_seconds=0)) == []


def test_a_lease_that_is_given_back(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    client.upload(batch)
    leased = client.lease(terms(run))
    assert client.release([leased]) == {batch.id: Outcome.OK}
    again = client.lease(terms(run))
    assert (again.id, again.deliveries) == (batch.id, 1) and again.token != leased.token
    client.extend([again], 60, started=True)
    client.release([again], error="the loss is not finite")
    assert client.ack([], "x") == client.extend([], 30) == client.release([]) == {}
    assert client.lease(terms(run)).deliveries == 2


def test_a_run_that_is_finished(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run, lineage="one")
    client.upload(batch)
    leased = client.lease(terms(run).model_copy(update={"lineage": "one"}))  # scored by now
    client.release([leased])
    assert client.finish_run(run, "one").expired == 1
    assert (client.batch(batch.id).lineage, client.batch(batch.id).reason) == ("one", "finished")


def test_metrics_of_a_run(client: Any, run: str) -> None:
    run = f"{run} / \u00e9"[:4] + run  # any name
    records = [{"kind": "step", "step": step, "reward": step / 2, "batch_ids": ["a"]} for step in range(3)]
    assert client.report_metrics(run, records, lineage="one").kept == 3
    curves = client.run_metrics(run, ["reward"], after=0, limit=1)
    assert (curves.lineage, curves.steps, curves.values, curves.next_after) == ("one", [1], {"reward": [0.5]}, 1)
    assert client.run_metrics(run, kind=Kind.HEALTH, lineage="one").steps == []
    assert client.step_records(run, 2, "one") == client.step_records(run, 2) == [records[2]]
    assert client.report_metrics(run, records[:1], lineage="one", after=-1).kept == 1
    assert next(each for each in client.runs() if each.run == run).records == 1
    with pytest.raises(RefServerError, match="no metrics"):
        client.run_metrics(run, lineage="")
    with pytest.raises(ValueError, match="JSON"):
        client.report_metrics(run, [{"kind": "step", "step": 1, "kl": math.nan}])


def test_many_leases_are_settled_at_once(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    leases = [Leased(batch, UNKNOWN[:-4] + f"{number:04d}", "token", 1) for number in range(1500)]
    assert set(client.ack(leases).values()) == {Outcome.UNKNOWN}
    assert len(client.ack(leases)) == 1500


def test_scores(client: Any, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = client.logprobs("2+3=", ["5", "61"], temperature=0.5)
    assert texts.tokens == [["5"], ["6", "1"]]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("2+3=", "5", "61")]
    assert client.logprobs_of_ids(ids[0], ids[1:], temperature=0.5) == texts
    batch = rollout(temperature=0.5)
    scored = client.score(batch)
    group = batch.group
    rows = client.logprobs_of_ids(
        group.prompt_ids.tolist(), [row.tolist() for row in group.completions()], temperature=0.5
    )
    np.testing.assert_allclose(scored.ref_logps, np.concatenate(rows.logprobs), atol=1e-6)
    assert scored.id == batch.id
    np.testing.assert_array_equal(client.score(wire.encode(batch)).ref_logps, scored.ref_logps)


def test_lists(client: Any, rollout: Rollout, run: str) -> None:
    ids = [client.upload(rollout(run=run)).id for _ in range(3)]
    assert [batch.id for batch in client.batches(run=run)] == ids
    page = client.page(run=run, limit=2)
    assert [batch.id for batch in page.batches] == ids[:2]
    assert [batch.id for batch in client.page(run=run, limit=2, cursor=page.next_cursor).batches] == ids[2:]
    assert list(client.batches(State.DEAD, run)) == list(client.batches("dead", run)) == []
    assert {batch.run for batch in client.batches()} >= {run}
    view = client.tokens(ids[0])
    assert view.id == ids[0] and len(view.rows) == 3 and view.rows[0].sampler_logps is None


def test_what_training_made_of_a_batch(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    client.upload(batch)
    leased = client.lease(terms(run))
    assert client.rewards(batch.id).lengths == batch.group.completion_lengths.tolist()
    tokens = np.zeros(len(batch.group.completion_ids), np.float32)
    assert client.put_training(batch.id, Training(5, tokens, tokens)).state is State.LEASED
    client.ack([leased])
    assert client.tokens(batch.id).trained_step == 5
    assert [kept.id for kept in client.page(run=run, kept=True).batches] == [batch.id]
    client.drop(batch.id)
    assert client.page(run=run, kept=True).batches == []


def test_an_operator(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    client.upload(batch)
    for _ in range(client.queue().limits.max_deliveries):
        leased = client.lease(terms(run))
        client.release([leased], error="it cannot be used")
    assert client.batch(batch.id).state is State.DEAD
    assert client.requeue(batch.id).state is State.READY
    with pytest.raises(RefServerError, match="only an expired or a dead batch") as refused:
        client.requeue(batch.id)
    assert (refused.value.status, refused.value.code, refused.value.field) == (409, "wrong_state", "id")
    assert client.drop(batch.id) is client.drop(batch.id) is None
    assert client.batch(batch.id).payload_bytes == 0


def test_a_purge(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run, lineage="one")
    client.upload(batch)
    client.release([client.lease(terms(run).model_copy(update={"lineage": "one"}))])  # scored by now
    size = client.batch(batch.id).payload_bytes
    chosen = PurgeBody(state="ready", run=run)
    assert client.purge(chosen) == Purged(dropped=[batch.id], bytes=size, next_cursor=None)
    assert client.purge(chosen).dropped == []
    assert client.batch(batch.id).reason == "dropped"


def test_what_it_refuses(client: Any, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run)
    client.upload(batch)
    with pytest.raises(RefServerError) as conflict:
        client.upload(replace(batch, policy_version=9))
    assert (conflict.value.status, conflict.value.code, conflict.value.field) == (409, "conflict", "id")
    assert conflict.value.request_id
    with pytest.raises(RefServerError, match="is known here") as unknown:
        client.batch(UNKNOWN)
    assert (unknown.value.status, unknown.value.code) == (404, "not_found")
    with pytest.raises(RefServerError) as foreign:
        client.logprobs_of_ids([10**6], [[1]])
    assert (foreign.value.status, foreign.value.field) == (422, "prompt_ids")


def test_many_threads_share_a_client(url: str, rollout: Rollout, run: str) -> None:
    batches = [rollout(run=run) for _ in range(40)]
    with RefServerClient(url) as client, ThreadPoolExecutor(8) as threads:

        def settle(_: int) -> list[str]:
            leased = client.lease(terms(run))
            return list(client.ack([leased])) if leased else []

        uploaded = {admitted.id for admitted in threads.map(client.upload, batches)}
        settled = [id for ids in threads.map(settle, range(40)) for id in ids]
    assert sorted(settled) == sorted(uploaded) == sorted(batch.id for batch in batches)
