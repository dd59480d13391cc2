"""A client that sends each call once, to servers that come and go, and records it with its begin, end and answer."""

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from shared import wire
from shared.batch import RolloutBatch
from tests.chaos.history import History

Key = dict[str, str]

_PATIENCE = 30.0


class Caller:
    """Not safe to share between threads. Each method returns the status of the answer, None if there was none."""

    def __init__(self, urls: Sequence[str], history: History, chance: random.Random) -> None:
        self._urls = urls
        self._history = history
        self._chance = chance
        self._http = httpx.Client(timeout=_PATIENCE)

    def upload(self, batch: RolloutBatch) -> int | None:
        body = wire.encode(batch)
        asked = {"id": batch.id, "run": batch.run, "lineage": batch.lineage, "content": _digest(body)}
        return self._send("upload", asked, "POST", "/batches", body, _state)[0]

    def lease(self, body: dict[str, Any]) -> tuple[int | None, list[Key]]:
        """The status, and the keys of the leases."""
        names = ("consumer", "incarnation", "request_id", "run", "lineage")
        asked = {**{name: body.get(name) for name in names}, "seconds": body["lease_seconds"]}
        status, told = self._send("lease", asked, "POST", "/batches/lease", body, _leased)
        return status, [{"id": lease["id"], "token": lease["token"]} for lease in told.get("leases", ())]

    def settle(self, verb: str, keys: Sequence[Key], **more: Any) -> int | None:
        """verb: ack, extend or release."""
        seconds, started, error = more.get("lease_seconds", 0.0), more.get("started", False), "error" in more
        named = [(key["id"], key["token"]) for key in keys]
        asked = {"keys": named, "seconds": seconds, "started": started, "error": error}
        return self._send(verb, asked, "POST", f"/leases/{verb}", {"leases": list(keys), **more}, _outcomes)[0]

    def requeue(self, id: str) -> None:
        self._send("requeue", {"id": id}, "POST", f"/batches/{id}/requeue", None, _state)

    def drop(self, id: str) -> None:
        self._send("drop", {"id": id}, "DELETE", f"/batches/{id}", None, lambda _: {})

    def finish(self, run: str, lineage: str | None) -> None:
        body = {"lineage": lineage}
        self._send("finish", {"run": run, **body}, "POST", f"/runs/{run}/finish", body, lambda _: {})

    def look(self, id: str) -> None:
        self._send("look", {"id": id}, "GET", f"/batches/{id}", None, _details)

    def _send(
        self, verb: str, asked: dict[str, Any], method: str, path: str, body: Any, read: Callable[[httpx.Response], Any]
    ) -> tuple[int | None, dict[str, Any]]:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = wire.CONTENT_TYPE if isinstance(body, bytes) else "application/json"
        url = f"{self._chance.choice(self._urls)}/v1{path}"
        status, told, begin = None, {}, time.monotonic()
        try:
            answer = self._http.request(method, url, content=content, headers={"Content-Type": kind})
            status, told = answer.status_code, read(answer)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            time.sleep(0.02)
            return None, {}  # it was never sent
        except httpx.TransportError:
            pass
        self._history.record("call", verb=verb, begin=begin, end=time.monotonic(), status=status, **asked, **told)
        return status, told

    def close(self) -> None:
        self._http.close()


def _digest(body: bytes) -> str:
    return wire.content_hash(body).hex()[:16]


def _state(answer: httpx.Response) -> dict[str, Any]:
    return {"state": answer.json()["state"]} if answer.is_success else {}


def _details(answer: httpx.Response) -> dict[str, Any]:
    return {"state": (told := answer.json())["state"], "deliveries": told["deliveries"]} if answer.is_success else {}


def _leased(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        return {}
    if answer.headers["Content-Type"] == wire.LEASES_CONTENT_TYPE:
        heads = wire.decode_leases(answer.content)
        leases = [(head.id, head.token, head.deliveries, _digest(body)) for head, body in heads]
    else:
        id, token, deliveries = (answer.headers[name] for name in ("Batch-Id", "Lease-Token", "Deliveries"))
        leases = [(id, token, int(deliveries), _digest(answer.content))]
    return {"leases": [dict(zip(("id", "token", "deliveries", "content"), lease, strict=True)) for lease in leases]}


def _outcomes(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        return {}
    return {"outcomes": [result["outcome"] for result in answer.json()["results"]]}
