"""The operator's purge over HTTP."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx
import pytest

from shared import wire
from shared.batch import RolloutBatch


def upload(http: httpx.Client, batch: RolloutBatch) -> str:
    answer = http.post("/v1/batches", content=wire.encode(batch), headers={"Content-Type": wire.CONTENT_TYPE})
    assert answer.status_code == 201, answer.text
    return batch.id


def test_the_chosen_batches_are_dropped(http: httpx.Client, rollout: Callable[..., RolloutBatch]) -> None:
    run = uuid4().hex
    ids = [upload(http, rollout(run=run, lineage="one")) for _ in range(3)]
    other = upload(http, rollout(run=uuid4().hex))
    http.post("/v1/batches/lease", json={"consumer": "c", "run": run, "lineage": "one"})  # once one is scored
    chosen = {"run": run, "admitted_until": http.get(f"/v1/batches/{ids[1]}").json()["admitted_at"]}
    dropped = []
    while len(dropped) < 2:  # the scorer may have one
        for state in ("queued", "ready", "leased"):
            answer = http.post("/v1/batches/purge", json={"state": state, **chosen})
            assert (answer.status_code, answer.json()["next_cursor"]) == (200, None)
            dropped += answer.json()["dropped"]
    assert sorted(dropped) == sorted(ids[:2])
    assert {http.get(f"/v1/batches/{id}").json()["reason"] for id in ids[:2]} == {"dropped"}
    assert [http.get(f"/v1/batches/{id}").json()["reason"] for id in (ids[2], other)] == [None, None]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "state"),
        ({"state": "done"}, "state"),
        ({"state": "scoring"}, "state"),
        ({"state": "dead", "run": ""}, "run"),
        ({"state": "dead", "admitted_until": "yesterday"}, "admitted_until"),
        ({"state": "dead", "cursor": "-1"}, "cursor"),
        ({"state": "dead", "everything": True}, "everything"),
    ],
)
def test_what_is_no_choice(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    refused = http.post("/v1/batches/purge", json=body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
