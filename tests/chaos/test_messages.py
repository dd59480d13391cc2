"""The proxy's parser: ids and outcomes, and whether an answer is complete."""

import json
import random
from dataclasses import replace

import pytest

from shared import wire
from shared.api import Lease
from tests.chaos.batches import random_batch
from tests.chaos.proxy import parse_answer, parse_request

HEAD = b"POST %s HTTP/1.1\r\nHost: a:1\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n"
KEYS = {"leases": [{"id": "a", "token": "t"}, {"id": "b", "token": "u"}]}


def raw(status: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} Something", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def answer(status: int, body: bytes, **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return raw(status, {"content-length": str(len(body)), "connection": "close", **names}, body)


def test_an_upload_names_its_batch() -> None:
    batch = random_batch(random.Random(0), "run")
    request = replace(parse_request(HEAD % b"/v1/batches"), body=wire.encode(batch))
    assert (request.verb, request.ids()) == ("upload", [batch.id])
    assert replace(request, body=b"nonsense").ids() == ["unreadable"]


@pytest.mark.parametrize("verb", ["ack", "extend", "release"])
def test_a_settlement_names_its_batches_and_outcomes(verb: str) -> None:
    request = replace(parse_request(HEAD % f"/v1/leases/{verb}".encode()), body=json.dumps(KEYS).encode())
    assert (request.verb, request.ids()) == (verb, ["a", "b"])
    results = {"results": [{"id": "a", "outcome": "ok"}, {"id": "b", "outcome": "stale"}]}
    parsed = parse_answer(answer(200, json.dumps(results).encode()))
    assert parsed and parsed.told(verb) == {"ids": ["a", "b"], "outcomes": ["ok", "stale"]}


def test_a_lease_is_read_from_its_headers() -> None:
    leased = parse_answer(answer(200, b"a batch", Batch_Id="a", Lease_Token="t"))
    assert leased and leased.told("lease") == {"ids": ["a"], "tokens": ["t"]}
    nothing = parse_answer(raw(204, {}, b""))
    assert nothing and nothing.told("lease") == {"ids": []}


def test_a_lease_of_several_is_read_from_its_body() -> None:
    heads = [Lease(id=id, token=f"t{id}", lease_seconds=9.0, deliveries=1, bytes=7) for id in "ab"]
    body = b"".join(wire.encode_leases((head, b"a batch") for head in heads))
    leased = parse_answer(answer(200, body, Content_Type=wire.LEASES_CONTENT_TYPE))
    assert leased and leased.told("lease") == {"ids": ["a", "b"], "tokens": ["ta", "tb"]}


def test_connection_close_is_sent_to_the_server_and_removed_for_the_client() -> None:
    head = parse_request(HEAD % b"/v1/queue").without_connection()
    assert b"keep-alive" not in head and head.endswith(b"connection: close\r\n\r\n") and b"host: a:1" in head
    parsed = parse_answer(answer(201, b'{"id": "a"}'))
    assert parsed and b"connection" not in parsed.raw and parsed.raw.endswith(b'\r\n\r\n{"id": "a"}')
    assert parsed.told("upload") == {"ids": ["a"]}


def test_an_incomplete_answer_is_none() -> None:
    whole = answer(201, b'{"id": "a"}')
    assert parse_answer(whole)
    assert [parse_answer(whole[:size]) for size in range(len(whole))] == [None] * len(whole)
