"""Tokens for single runs, at each route."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from ref_server.access.keys import Role
from ref_server.access.requirements import Requirement, requirement_of
from ref_server.config import QueueConfig
from ref_server.http.app import create_app
from ref_server.service.service import Service
from shared import wire
from tests.ref_server.calls import SAFETENSORS, MakeService, Rollout, Serve, bearer, upload

ADMIN, MINE, TWIN = ({"Authorization": f"Bearer {name}-0123456789abcdef"} for name in ("admin", "mine", "twin"))
ADMIN, MINE, TWIN = (bearer(f"{name}-0123456789abcdef") for name in ("admin", "mine", "twin"))
FILE = """
admin admin-0123456789abcdef
train mine-0123456789abcdef name=mine run=mine
train twin-0123456789abcdef name=twin run=yours
"""
WEIGHTS = "/v1/weights/{run}/{lineage}/{epoch}/{version}"


@pytest.fixture(scope="module")
def service(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> Service:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(FILE)
    return make_service(token_file=file)


@pytest.fixture(scope="module")
def http(service: Service, serve: Serve) -> Iterator[httpx.Client]:
    with serve(service) as client:
        yield client


def routes(service: Service) -> Iterator[tuple[str, str, Requirement]]:
    """Method, path and requirement of each route that wants a token."""
    for route in create_app(service).routes:
        if isinstance(route, APIRoute) and requirement_of(route).role is not Role.OPEN:
            for method in route.methods or ():
                yield method, route.path, requirement_of(route)


def test_a_token_that_invents_runs_takes_no_room_of_others(
    make_service: MakeService, serve: Serve, rollout: Rollout, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("upload mallory-0123456789\nupload honest-0123456789 name=ann run=honest\n")
    mallory, ann = ({"Authorization": f"Bearer {name}-0123456789"} for name in ("mallory", "honest"))
    limits = QueueConfig(max_batches=12)
    with serve(make_service(token_file=tmp_path / "tokens", queue=limits)) as http:
        admitted = [upload(http, rollout(run=f"made-up-{i}"), **mallory).status_code for i in range(10)]
        assert admitted == [201] * 8 + [429] * 2
        assert upload(http, rollout(run="honest"), **ann).status_code == 201


def lease(http: httpx.Client, who: dict[str, str], **body: object) -> httpx.Response:
    return http.post("/v1/batches/lease", json={"consumer": "c", **body}, headers=who)


def foreign_requests(key: dict[str, str], body: bytes) -> dict[tuple[str, str], dict[str, Any] | None]:
    """For routes that are open to tokens of one run: a request about another run, or None if there can be none.

    Where neither is given, the run, or what belongs to it, is in the path or in `?run=`. key: of a lease of that run.
    body: of a batch of it.
    """
    return {
        ("GET", "/v1/model"): None,
        ("POST", "/v1/logprobs"): None,
        ("GET", "/v1/models"): None,
        ("POST", "/v1/completions"): None,
        ("GET", "/v1/queue"): None,
        ("GET", "/v1/throughput"): None,
        ("POST", "/v1/batches"): {"content": body, "headers": SAFETENSORS | MINE},
        ("PUT", "/v1/batches/{id}/training"): {"content": b"", "headers": SAFETENSORS | MINE},
        ("POST", "/v1/batches/lease"): {"json": {"consumer": "c", "run": "yours"}},
        ("POST", "/v1/leases/ack"): {"json": {"leases": [key]}},
        ("POST", "/v1/leases/extend"): {"json": {"leases": [key], "lease_seconds": 60}},
        ("POST", "/v1/leases/release"): {"json": {"leases": [key]}},
        ("POST", "/v1/runs/{run}/finish"): {"json": {}},
        ("POST", "/v1/runs/{run}/metrics"): {"json": {"records": [{"kind": "step", "step": 1}]}},
        ("GET", "/v1/events"): None,
        ("GET", "/v1/runs"): None,
        ("PUT", f"{WEIGHTS}/{{file}}"): {"content": b"a", "headers": {"Content-Type": "a/b"} | MINE},
        ("POST", f"{WEIGHTS}/commit"): {"json": {"files": {"file": {"bytes": 1, "sha256": 64 * "0"}}}},
    }


def test_other_runs_are_closed_to_a_token_of_one_run(service: Service, http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="yours")
    assert upload(http, batch, **ADMIN).status_code == 201
    leased = lease(http, ADMIN, run="yours")
    key = {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}
    requests = foreign_requests(key, wire.encode(rollout(run="yours")))
    every = [*routes(service)]
    assert requests.keys() <= {(method, path) for method, path, requirement in every if requirement.confines}
    for method, path, requirement in every:
        if (request := requests.get((method, path), {"params": {"run": "yours"}})) is not None:
            url = path.format(
                id=batch.id, run="yours", lineage="first", epoch=0, version=1, file="file", step=1, number=0
            )
            answer = http.request(method, url, **{"headers": MINE, **request})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
            if requirement.role < Role.ADMIN:
                assert "for run 'mine' only" in answer.json()["error"]["message"]
    assert http.post("/v1/leases/ack", json={"leases": [key]}, headers=TWIN).json()["results"][0]["outcome"] == "ok"


def test_every_route_for_admins_that_changes_something_is_audited(service: Service) -> None:
    for _, path, requirement in routes(service):
        assert requirement.audited or requirement.role is not Role.ADMIN, path


def test_a_token_of_one_run_serves_a_whole_training(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="mine")
    assert upload(http, batch, **MINE).status_code == 201
    assert {each["run"] for each in http.get("/v1/batches", headers=MINE).json()["batches"]} == {"mine"}
    assert set(http.get("/v1/queue", headers=MINE).json()["runs"]) == {"mine"}
    assert http.get(f"/v1/batches/{batch.id}", headers=MINE).json()["run"] == "mine"
    assert http.get(f"/v1/batches/{batch.id}/tokens", headers=MINE).json()["id"] == batch.id
    leased = lease(http, MINE)  # of its run, which it need not name
    assert leased.headers["Batch-Id"] == batch.id
    key = {"id": batch.id, "token": leased.headers["Lease-Token"]}
    released = http.post("/v1/leases/release", json={"leases": [key]}, headers=MINE)
    assert released.json()["results"][0]["outcome"] == "ok"
    assert http.post("/v1/runs/mine/finish", json={}, headers=MINE).json() == {"expired": 1}


def test_a_token_of_one_run_cannot_end_another_s_leases_by_a_consumer_s_name(
    http: httpx.Client, rollout: Rollout
) -> None:
    batch = rollout(run="yours")
    assert upload(http, batch, **TWIN).status_code == 201
    leased = lease(http, TWIN, consumer="trainer", incarnation="1", request_id="r")
    assert leased.headers["Batch-Id"] == batch.id
    refused = lease(http, MINE, consumer="trainer", incarnation="2", request_id="r", wait_seconds=0)
    assert refused.status_code == 204
    key = {"id": batch.id, "token": leased.headers["Lease-Token"]}
    answer = http.post("/v1/leases/ack", json={"leases": [key]}, headers=TWIN)
    assert answer.json()["results"] == [{"id": batch.id, "outcome": "ok"}]
