"""The end of a run over HTTP."""

from collections.abc import Callable
from uuid import uuid4

import httpx

from shared import wire
from shared.batch import RolloutBatch


def upload(http: httpx.Client, batch: RolloutBatch) -> str:
    answer = http.post("/v1/batches", content=wire.encode(batch), headers={"Content-Type": wire.CONTENT_TYPE})
    assert answer.status_code == 201, answer.text
    return answer.json()["state"]


def test_what_comes_later_expires(http: httpx.Client, rollout: Callable[..., RolloutBatch]) -> None:
    run = uuid4().hex
    asked = {"lineage": "one"}
    answer = http.post(f"/v1/runs/{run}/finish", json=asked)
    assert (answer.status_code, answer.json()) == (200, {"expired": 0})
    assert upload(http, rollout(run=run, lineage="one")) == "expired"
    assert upload(http, rollout(run=run, lineage="two")) == "queued"


def test_a_run_without_lineages_ends_too(http: httpx.Client, rollout: Callable[..., RolloutBatch]) -> None:
    run = uuid4().hex
    http.post(f"/v1/runs/{run}/finish", json={})
    assert upload(http, rollout(run=run)) == "expired"


def test_the_legacy_protocol_s_run_is_not_ended(http: httpx.Client) -> None:
    refused = http.post("/v1/runs/legacy/finish", json={})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "run")


def test_names_are_bounded(http: httpx.Client) -> None:
    assert http.post(f"/v1/runs/{'x' * 201}/finish", json={}).status_code == 422
    assert http.post("/v1/runs/mine/finish", json={"lineage": "a b"}).json()["error"]["field"] == "lineage"
