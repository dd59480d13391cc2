"""Requests and answers of the reference server's API, parsed from their bytes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared import wire

_VERBS = {
    ("POST", "/v1/batches"): "upload",
    ("POST", "/v1/batches/lease"): "lease",
    ("POST", "/v1/leases/ack"): "ack",
    ("POST", "/v1/leases/extend"): "extend",
    ("POST", "/v1/leases/release"): "release",
}


@dataclass(frozen=True)
class Request:
    """headers: names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def verb(self) -> str:
        """upload, lease, ack, extend or release; "look" for everything else."""
        return _VERBS.get((self.method, self.path), "look")

    def ids(self) -> list[str]:
        """Batches that the request names."""
        if self.verb == "upload":
            return [_batch_id(self.body)]
        if self.verb in ("ack", "extend", "release"):
            return [key["id"] for key in json.loads(self.body)["leases"]]
        return []

    def without_connection(self) -> bytes:
        """The head, asking the server to close after its answer, so that the answer ends where the stream ends."""
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items() if name != "connection"]
        return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Answer:
    """raw: as sent to the client, without `connection: close`, so that the client may keep its connection."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes

    def told(self, verb: str) -> dict[str, Any]:
        """Ids of the batches in it; for a lease also the tokens, for settled leases the outcomes."""
        if self.status not in (200, 201):
            return {"ids": []}
        if verb == "upload":
            return {"ids": [json.loads(self.body)["id"]]}
        if verb == "lease":
            keys = leased_keys(self.headers, self.body)
            return {"ids": [id for id, _ in keys], "tokens": [token for _, token in keys]}
        if verb in ("ack", "extend", "release"):
            results = json.loads(self.body)["results"]
            return {"ids": [r["id"] for r in results], "outcomes": [r["outcome"] for r in results]}
        return {"ids": []}


def leased_keys(headers: Mapping[str, str], body: bytes) -> list[tuple[str, str]]:
    """Ids and tokens of the answer to a lease, in either of its forms. headers: names in lower case."""
    if headers.get("content-type") == wire.LEASES_CONTENT_TYPE:
        return [(head.id, head.token) for head, _ in wire.decode_leases(body)]
    return [(headers["batch-id"], headers["lease-token"])]


def parse_request(head: bytes) -> Request:
    """A request, still without its body."""
    first, headers = _parse_head(head)
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers, b"")


def parse_answer(raw: bytes) -> Answer | None:
    """A complete answer, or None if the server ended before it was complete."""
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        return None
    first, headers = _parse_head(head)
    if len(body) < int(headers.get("content-length", "0")):
        return None
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return Answer(int(first.split(" ")[1]), headers, body, b"\r\n".join(lines) + separator + body)


def _parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return first, {name.strip().lower(): value.strip() for name, value in pairs}


def _batch_id(body: bytes) -> str:
    with suppress(ValueError, KeyError):
        size = int.from_bytes(body[:8], "little")
        return json.loads(body[8 : 8 + size])["__metadata__"]["id"]
    return "unreadable"
