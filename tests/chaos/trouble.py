"""A client of a server whose store is temporarily not writable: the answers, and whether acknowledged data survives."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx

from shared import wire
from tests.chaos.stage import broken
from tests.harness.batches import random_batch
from tests.harness.processes import until
from tests.harness.server import Server

_RUN = "disk"
_BEFORE = 6
_LEASE_SECONDS = 2
_REFUSALS = 3
_MAX_UPLOADS = 1000


class Witness:
    """Sends each request once and records the answers, from before a trouble until all that was admitted is settled.

    admitted: ids whose upload was answered 200 or 201. answers: kind and status of each request during the trouble.
    reason: what /readyz said then. acked: ids whose ack was answered `ok` or `already`. known: states by id, listed by
    the server afterwards. again: statuses of the refused uploads, repeated afterwards. alive: the same process became
    ready again.
    """

    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server = server
        self._chance = chance
        self.admitted: list[str] = []
        self.answers: list[tuple[str, int]] = []
        self.reason = ""
        self.acked: list[str] = []
        self.known: dict[str, str] = {}
        self.again: list[int] = []
        self.alive = False

    def faults(self, refusals: Sequence[int], reason: str) -> list[str]:
        """refusals: allowed statuses during the trouble, besides success. reason: what /readyz must name."""
        known, allowed = self.known, (200, 201, 204, *refusals)
        return broken({
            "requests were answered otherwise": [each for each in self.answers if each[1] not in allowed],
            "no upload was refused: there was no trouble": not self.again,
            f"/readyz returned {self.reason!r}, which does not name {reason!r}": reason not in self.reason,
            "admitted batches are not known afterwards": set(self.admitted) - known.keys(),
            "acked batches are not done": {id for id in self.acked if known.get(id) != "done"},
            "admitted batches could not be settled": {id for id in self.admitted if known.get(id, "done") != "done"},
            "refused uploads were refused afterwards": [status for status in self.again if status != 201],
            "the server did not recover by itself": not self.alive,
        })  # fmt: skip

    def go_through(self, block: AbstractContextManager[None]) -> "Witness":
        """Sends requests before, in and after `block`, in which the store cannot be written."""
        held = self.prepare()
        with block:
            refused = self.upload_until_refused()
            self._ask_everything(held)
            self.reason = until(lambda: not_ready(self.server), "/readyz to report the trouble", self.server)
        self.recover(refused)
        return self

    def prepare(self) -> list[dict[str, str]]:
        """Uploads a few batches and leases half of them; returns the keys of the leases."""
        for _ in range(_BEFORE):
            status = self._upload()[1]
            assert status == 201, status
        keys = [self._lease(wait_seconds=20) for _ in range(_BEFORE // 2)]
        return [key for key in keys if key]

    def upload_until_refused(self) -> list[bytes]:
        """Uploads until some are refused, and returns these."""
        refused: list[bytes] = []
        for _ in range(_MAX_UPLOADS):
            body, status = self._upload()
            self.answers.append(("upload", status))
            if status >= 400:
                refused.append(body)
                if len(refused) == _REFUSALS:
                    break
        return refused

    def recover(self, refused: Sequence[bytes]) -> None:
        """Waits until the server is ready, repeats the refused uploads, and settles everything."""
        until(lambda: not not_ready(self.server), "the server to be ready again", self.server)
        self.alive = self.server.popen.poll() is None
        self.again = [self._upload(body)[1] for body in refused]
        while key := self._lease(wait_seconds=_LEASE_SECONDS + 1):  # also what is still leased from before
            self._ack(key)
        self.known = {batch["id"]: batch["state"] for batch in self.server.batches(run=_RUN)}

    def _ask_everything(self, held: Sequence[dict[str, str]]) -> None:
        """Sends every kind of request of a consumer."""
        extend, release, ack = held
        late = {"consumer": "late", "run": _RUN, "lease_seconds": _LEASE_SECONDS, "wait_seconds": 0}
        requests = {
            "extend": lambda: self._post("/v1/leases/extend", {"leases": [extend], "lease_seconds": _LEASE_SECONDS}),
            "release": lambda: self._post("/v1/leases/release", {"leases": [release]}),
            "ack": lambda: self._ack(ack),
            "lease": lambda: self._post("/v1/batches/lease", late),
            "list": lambda: httpx.get(f"{self.server.url}/v1/batches"),
            "queue": lambda: httpx.get(f"{self.server.url}/v1/queue"),
            "livez": lambda: httpx.get(f"{self.server.url}/livez"),
        }  # fmt: skip
        self.answers += [(what, ask().status_code) for what, ask in requests.items()]

    def _upload(self, body: bytes | None = None) -> tuple[bytes, int]:
        body = body or wire.encode(random_batch(self._chance, _RUN, longest=40, completions=16))
        answer = httpx.post(
            f"{self.server.url}/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE}, timeout=30
        )
        batch = wire.decode(body)
        assert batch.ref_logps is None
        if answer.is_success:
            self.admitted.append(batch.id)
        return body, answer.status_code

    def _lease(self, wait_seconds: float) -> dict[str, str] | None:
        body = {"consumer": "witness", "run": _RUN, "lease_seconds": _LEASE_SECONDS, "wait_seconds": wait_seconds}
        answer = self._post("/v1/batches/lease", body)
        if answer.status_code != 200:
            return None
        return {"id": answer.headers["Batch-Id"], "token": answer.headers["Lease-Token"]}

    def _ack(self, key: dict[str, str]) -> httpx.Response:
        answer = self._post("/v1/leases/ack", {"leases": [key]})
        outcome = answer.json()["results"][0]["outcome"] if answer.is_success else ""
        if outcome in ("ok", "already"):
            self.acked.append(key["id"])
        return answer

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=30)


def not_ready(server: Server) -> str:
    """The reason that /readyz gives; empty if the server is ready or does not answer."""
    try:
        answer = httpx.get(server.url + "/readyz", timeout=30)
    except httpx.TransportError:
        return ""
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]


def counted(witnesses: Sequence[Witness]) -> str:
    """All answers during the troubles, as `upload 507: 3, …`."""
    counts = Counter(f"{kind} {status}" for witness in witnesses for kind, status in witness.answers)
    return ", ".join(f"{answer}: {count}" for answer, count in sorted(counts.items()))
