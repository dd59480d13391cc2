"""Runs over HTTP: their metrics, their end, and purging their batches."""

from typing import Any
from uuid import uuid4

import httpx
import pytest

from shared.api import MAX_RECORD_BYTES
from tests.ref_server.calls import Rollout, admit, error, lease, upload


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, **fields}


def report(http: httpx.Client, run: str, *records: dict[str, Any], **fields: Any) -> httpx.Response:
    return http.post(f"/v1/runs/{run}/metrics", json={"records": records, **fields})


def look(http: httpx.Client, run: str, **params: Any) -> dict[str, Any]:
    answer = http.get(f"/v1/runs/{run}/metrics", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get("/v1/runs", params={"limit": 1000}).json()["runs"]


def test_columns_of_what_was_reported(http: httpx.Client, run: str) -> None:
    first = step(1, reward=0.5, kl=None, not_finite=False, batch_ids=["a"], rewards={"tags": 1, "deep": {"er": 2}})
    assert report(http, run, first, step(2, reward=1, kl=0.25, text="no number")).json() == {"kept": 2}
    columns = look(http, run)
    at = columns.pop("at")
    assert len(at) == 2 and at == sorted(at)
    assert columns == {
        "run": run,
        "lineage": "",
        "kind": "step",
        "steps": [1, 2],
        "values": {
            "reward": [0.5, 1],
            "not_finite": [0, None],
            "rewards/tags": [1, None],
            "rewards/deep/er": [2, None],
            "kl": [None, 0.25],
        },
        "next_after": None,
    }
    named = look(http, run, names=["kl", "absent"], after=1)
    assert (named["steps"], named["values"]) == ([2], {"kl": [0.25], "absent": [None]})
    assert look(http, run, kind="evaluation")["steps"] == []
    assert http.get(f"/v1/runs/{run}/metrics/1").json() == {"records": [first]}


def test_lineages_and_the_list_of_runs(http: httpx.Client, run: str) -> None:
    report(http, run, step(8), step(8, kind="evaluation"), lineage="old")
    report(http, run, step(1), lineage="new")
    assert (look(http, run)["lineage"], look(http, run, lineage="old")["steps"]) == ("new", [8])
    report(http, run, step(6), lineage="old", after=5)
    assert (look(http, run)["lineage"], look(http, run)["steps"]) == ("old", [6])
    assert http.get(f"/v1/runs/{run}/metrics/6").json()["records"] == [step(6)]
    report(http, run, step(2))  # of a client that names no lineage
    assert look(http, run, lineage="")["steps"] == [2]
    lineages = [each for each in listed(http) if each["run"] == run]
    assert [(each["lineage"], each["records"], each["step"]) for each in lineages] == [
        ("", 1, 2),
        ("old", 1, 6),
        ("new", 1, 1),
    ]
    assert all(each["first_at"] <= each["updated_at"] for each in lineages)


def test_runs_page_by_page(http: httpx.Client) -> None:
    names = [f"run: {number} {uuid4()}" for number in range(3)]
    for name in names:
        report(http, name, step(1), lineage="a.b-c")
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = http.get("/v1/runs", params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        seen += [each["run"] for each in page["runs"]]
        cursor = page["next_cursor"]
    assert seen[:3] == names[::-1]
    assert seen == [each["run"] for each in listed(http)]
    for wrong in ("x", "1:a", "1e:l:r", "inf:l:r", "1.5:no lineage:r"):
        assert http.get("/v1/runs", params={"cursor": wrong}).json()["error"]["field"] == "cursor"


def test_what_is_not_there(http: httpx.Client, run: str) -> None:
    def field(path: str, **params: Any) -> str:
        return error(http.get(f"/v1/runs/{run}/metrics{path}", params=params), 404)["field"]

    assert field("") == field("/1") == "run"
    report(http, run, step(1))
    assert field("", lineage="other") == field("/1", lineage="other") == "lineage"
    assert field("/2") == "step"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ('{"kind": "step", "step": 1, "kl": NaN}', "records.0.kl"),
        ('{"kind": "step", "step": 1, "a": 1e999}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": 99999999999999999999}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": "\\ud800"}', "records.0.a"),
        ('{"kind": "step", "step": 1.5}', "records.0.step"),
        ('{"kind": "step", "step": -1}', "records.0.step"),
        ('{"kind": "other", "step": 1}', "records.0.kind"),
        ('{"kind": "step", "step": 1, "name": 3}', "records.0.name"),
        ('{"kind": "step", "step": 1, "a": %s}' % ("[" * 20 + "]" * 20), "records.0.a"),
        ('{"kind": "step", "step": 1, "a": "%s"}' % ("x" * MAX_RECORD_BYTES), "records.0"),
        ('{"kind": "step", "step": 1, "a": "%s"}' % ("\u00e9" * (MAX_RECORD_BYTES // 6)), "records.0"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_named(http: httpx.Client, run: str, record: str, field: str) -> None:
    body = f'{{"records": [{record}]}}'.encode()
    refused = http.post(f"/v1/runs/{run}/metrics", content=body, headers={"Content-Type": "application/json"})
    assert error(refused, 422)["field"] == field
    assert http.get(f"/v1/runs/{run}/metrics").status_code == 404


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"records": []}, "records"),
        ({"records": [step(number) for number in range(257)]}, "records"),
        ({"records": [step(1)], "after": -2}, "after"),
        ({"records": [step(1)], "lineage": "a b"}, "lineage"),
        ({"records": [step(1)], "more": 1}, "more"),
    ],
)
def test_a_wrong_body_is_named(http: httpx.Client, run: str, fields: dict[str, Any], field: str) -> None:
    assert error(http.post(f"/v1/runs/{run}/metrics", json=fields), 422)["field"] == field


@pytest.mark.parametrize("name", ["legacy", "a%0Ab", "x" * 201])
def test_a_bad_name_of_a_run(http: httpx.Client, name: str) -> None:
    assert error(report(http, name, step(1)), 422)["field"].endswith("run")


@pytest.mark.parametrize("name", ["legacy", "x" * 201])
def test_a_run_that_cannot_be_finished(http: httpx.Client, name: str) -> None:
    assert error(http.post(f"/v1/runs/{name}/finish", json={}), 422)["field"].endswith("run")


def test_texts_come_back_as_they_were(http: httpx.Client, run: str) -> None:
    odd = step(1, text="<script>\u001b[31m \u202e \u00e9 \U0001f600\0", **{"a/b\u00e9": 1, "": 2})
    report(http, run, odd)
    assert http.get(f"/v1/runs/{run}/metrics/1").json()["records"] == [odd]
    assert look(http, run)["values"] == {"a/b\u00e9": [1], "": [2]}


# The end of a run


def test_later_batches_of_a_finished_run_expire(http: httpx.Client, rollout: Rollout, run: str) -> None:
    answer = http.post(f"/v1/runs/{run}/finish", json={"lineage": "one"})
    assert (answer.status_code, answer.json()) == (200, {"expired": 0})
    for lineage, state in (("one", "expired"), ("two", "queued")):
        assert upload(http, rollout(run=run, lineage=lineage)).json()["state"] == state
    assert error(http.post(f"/v1/runs/{run}/finish", json={"lineage": "a b"}), 422)["field"] == "lineage"


# Purging


def test_purge_drops_the_chosen_batches(http: httpx.Client, rollout: Rollout, run: str) -> None:
    ids = admit(http, *(rollout(run=run, lineage="one") for _ in range(3)))
    (other,) = admit(http, rollout(run=uuid4().hex))
    lease(http, run, lineage="one")
    chosen = {"run": run, "admitted_until": http.get(f"/v1/batches/{ids[1]}").json()["admitted_at"]}
    dropped = []
    while len(dropped) < 2:  # one may be in scoring
        for state in ("queued", "ready", "leased"):
            answer = http.post("/v1/batches/purge", json={"state": state, **chosen})
            assert (answer.status_code, answer.json()["next_cursor"]) == (200, None)
            dropped += answer.json()["dropped"]
    assert sorted(dropped) == sorted(ids[:2])
    reasons = {id: http.get(f"/v1/batches/{id}").json()["reason"] for id in (*ids, other)}
    assert reasons == {ids[0]: "dropped", ids[1]: "dropped", ids[2]: None, other: None}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "state"),
        ({"state": "scoring"}, "state"),
        ({"state": "dead", "run": ""}, "run"),
        ({"state": "dead", "admitted_until": "yesterday"}, "admitted_until"),
        ({"state": "dead", "cursor": "-1"}, "cursor"),
        ({"state": "dead", "everything": True}, "everything"),
    ],
)
def test_a_bad_purge(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    assert error(http.post("/v1/batches/purge", json=body), 422)["field"] == field


def test_a_page_of_too_many_different_numbers_is_refused(http: httpx.Client, run: str) -> None:
    """Small records whose names all differ would take a gigabyte as columns."""
    for begin in range(0, 1000, 250):
        steps = [step(number, **{f"{number}/{i}": 1 for i in range(5)}) for number in range(begin, begin + 250)]
        assert report(http, run, *steps).status_code == 200
    refused = error(http.get(f"/v1/runs/{run}/metrics"), 422)
    assert refused["field"] == "limit" and "request fewer steps, or only some names" in refused["message"]
    assert len(look(http, run, limit=100)["values"]) == 500
    assert look(http, run, names=["7/1"])["values"]["7/1"][7] == 1


def test_an_empty_name_of_a_number_is_refused(http: httpx.Client, run: str) -> None:
    report(http, run, step(1))
    assert error(http.get(f"/v1/runs/{run}/metrics", params={"names": ""}), 422)["field"].startswith("names")
