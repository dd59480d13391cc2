"""The metrics of runs over HTTP: reported, listed, read as columns; and what is wrong with a record is named."""

import json
from typing import Any
from uuid import uuid4

import httpx
import pytest

from shared.api import MAX_RECORD_BYTES


@pytest.fixture
def run() -> str:
    return uuid4().hex


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
    told = look(http, run)
    at = told.pop("at")
    assert len(at) == 2 and at == sorted(at)
    assert told == {
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


def test_pages(http: httpx.Client, run: str) -> None:
    report(http, run, *(step(number) for number in range(5)))
    first = look(http, run, limit=3)
    assert (first["steps"], first["next_after"]) == ([0, 1, 2], 2)
    assert (look(http, run, limit=3, after=2)["next_after"], look(http, run, after=4)["steps"]) == (None, [])


def test_lineages_and_the_list_of_runs(http: httpx.Client, run: str) -> None:
    report(http, run, step(8), step(8, kind="evaluation"), lineage="old")
    report(http, run, step(1), lineage="new")
    assert (look(http, run)["lineage"], look(http, run, lineage="old")["steps"]) == ("new", [8])
    report(http, run, step(6), lineage="old", after=5)
    assert (look(http, run)["lineage"], look(http, run)["steps"]) == ("old", [6])
    assert http.get(f"/v1/runs/{run}/metrics/6").json()["records"] == [step(6)]
    report(http, run, step(2))  # of a client that names no lineage
    assert look(http, run, lineage="")["steps"] == [2]
    own = [each for each in listed(http) if each["run"] == run]
    assert [(each["lineage"], each["records"], each["step"]) for each in own] == [
        ("", 1, 2),
        ("old", 1, 6),
        ("new", 1, 1),
    ]
    assert all(each["first_at"] <= each["updated_at"] for each in own)


def test_runs_page_by_page(http: httpx.Client) -> None:
    names = [f"run: {number} {uuid4()}" for number in range(3)]
    for name in names:
        report(http, name, step(1), lineage="a.b-c")
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = http.get("/v1/runs", params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        found += [each["run"] for each in page["runs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found[:3] == names[::-1]
    assert found == [each["run"] for each in listed(http)]
    for wrong in ("x", "1:a", "1e:l:r", "inf:l:r", "1.5:no lineage:r"):
        assert http.get("/v1/runs", params={"cursor": wrong}).json()["error"]["field"] == "cursor"


def test_what_is_not_there(http: httpx.Client, run: str) -> None:
    def field(path: str, **params: Any) -> str:
        answer = http.get(f"/v1/runs/{run}/metrics{path}", params=params)
        assert answer.status_code == 404
        return answer.json()["error"]["field"]

    assert field("") == field("/1") == "run"
    report(http, run, step(1))
    assert field("", lineage="other") == field("/1", lineage="other") == "lineage"
    assert field("/2") == "step"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ('{"kind": "step", "step": 1, "kl": NaN}', "records.0.kl"),
        ('{"kind": "step", "step": 1, "a": {"b": [-Infinity]}}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": 1e999}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": 99999999999999999999}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": "\\ud800"}', "records.0.a"),
        ('{"kind": "step", "step": 1, "a": {"\\ud800": 1}}', "records.0.a"),
        ('{"kind": "step", "step": 1.5}', "records.0.step"),
        ('{"kind": "step", "step": "1"}', "records.0.step"),
        ('{"kind": "step", "step": -1}', "records.0.step"),
        ('{"kind": "step"}', "records.0.step"),
        ('{"kind": "other", "step": 1}', "records.0.kind"),
        ('{"kind": "step", "step": 1, "name": 3}', "records.0.name"),
        ("[]", "records.0"),
        ('{"kind": "step", "step": 1, "a": %s}' % ("[" * 20 + "]" * 20), "records.0.a"),
        ('{"kind": "step", "step": 1, "a": "%s"}' % ("x" * MAX_RECORD_BYTES), "records.0"),
        ('{"kind": "step", "step": 1, "a": "%s"}' % ("\u00e9" * (MAX_RECORD_BYTES // 6)), "records.0"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_named(http: httpx.Client, run: str, record: str, field: str) -> None:
    body = f'{{"records": [{record}]}}'.encode()
    refused = http.post(f"/v1/runs/{run}/metrics", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, field), refused.text
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
    refused = http.post(f"/v1/runs/{run}/metrics", json=fields)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)


@pytest.mark.parametrize("name", ["legacy", "a%0Ab", "x" * 201])
def test_a_bad_name_of_a_run(http: httpx.Client, name: str) -> None:
    refused = report(http, name, step(1))
    assert refused.status_code == 422
    assert refused.json()["error"]["field"].endswith("run")


def test_texts_come_back_as_they_were(http: httpx.Client, run: str) -> None:
    odd = step(1, text="<script>\u001b[31m \u202e \u00e9 \U0001f600\0", **{"a/b\u00e9": 1, "": 2})
    report(http, run, odd)
    assert http.get(f"/v1/runs/{run}/metrics/1").json()["records"] == [odd]
    assert look(http, run)["values"] == {"a/b\u00e9": [1], "": [2]}


def test_many_records(http: httpx.Client, run: str) -> None:
    for begin in range(0, 2000, 250):
        records = [step(begin + more, **{f"m{name}": 0.5 for name in range(20)}) for more in range(250)]
        assert report(http, run, *records).status_code == 200
    told = look(http, run, limit=2000)
    assert told["steps"] == list(range(2000))
    assert {len(values) for values in told["values"].values()} == {2000}
    assert json.dumps(told["values"]["m3"][:2]) == "[0.5, 0.5]"
