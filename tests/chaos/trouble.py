"""A server whose store is temporarily not writable: its answers, and whether acknowledged data survives."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared import wire
from shared.batch import RolloutBatch
from tests.chaos.batches import random_batch
from tests.chaos.proof import broken
from tests.integration.processes import Server, until

_BEFORE = 6
_LEASE_SECONDS = 2
_REFUSALS = 3
_MAX_UPLOADS = 1000


@dataclass
class Trouble:
    """One trouble, from before it until everything that was admitted is settled.

    admitted: ids whose upload was answered 200 or 201. refused: ids whose upload was not. answers: kind and status of
    each request during the trouble. reason: what /readyz said then. acked: ids whose ack was answered `ok` or
    `already`. known: states by id, listed by the server afterwards. again: statuses of the refused uploads, repeated
    afterwards. alive: the same process became ready again.
    """

    admitted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    reason: str = ""
    acked: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    alive: bool = False


def judge(trouble: Trouble, refusals: Sequence[int], reason: str) -> list[str]:
    """Lists the faults; empty if the test passed.

    refusals: allowed statuses during the trouble, besides success. reason: what /readyz must name.
    """
    answers = [f"{kind} was answered {status}" for kind, status in trouble.answers
               if status not in (200, 201, 204, *refusals)]  # fmt: skip
    known = trouble.known
    missing = set(trouble.admitted) - known.keys()
    undone = {id for id in trouble.acked if known.get(id) != "done"}
    stuck = {id for id in trouble.admitted if known.get(id, "done") != "done"}
    return answers + broken({
        "no upload was refused: there was no trouble": not trouble.refused,
        f"/readyz returned {trouble.reason!r}, which does not name {reason!r}": reason not in trouble.reason,
        f"{len(missing)} admitted batches are not known afterwards": missing,
        f"{len(undone)} acked batches are not done": undone,
        f"{len(stuck)} admitted batches could not be settled afterwards": stuck,
        f"of {len(trouble.refused)} refused uploads, repeated afterwards, the answers were {trouble.again}":
            trouble.again != [201] * len(trouble.refused),
        "the server did not recover by itself": not trouble.alive,
    })  # fmt: skip


def counted(troubles: Sequence[Trouble]) -> str:
    """All answers during the trouble, as `upload 507: 3, …`."""
    counts = Counter(f"{kind} {status}" for trouble in troubles for kind, status in trouble.answers)
    return ", ".join(f"{answer}: {count}" for answer, count in sorted(counts.items()))


class Witness:
    """A client that sends each request once and records the answer."""

    def __init__(self, server: Server, chance: random.Random, run: str, trouble: Trouble) -> None:
        self._server = server
        self._chance = chance
        self._run = run
        self._http = httpx.Client(base_url=server.url, timeout=30)
        self.trouble = trouble

    def go_through(self, block: AbstractContextManager[None]) -> Trouble:
        """Sends requests before, in and after `block`, in which the store cannot be written."""
        held = self.prepare()
        with block:
            refused = self.upload_until_refused()
            self._ask_everything(held)
            self.trouble.reason = until(lambda: not_ready(self._server), "/readyz to report the trouble", self._server)
        self.recover(refused)
        return self.trouble

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
            self.trouble.answers.append(("upload", status))
            if status >= 400:
                refused.append(body)
                if len(refused) == _REFUSALS:
                    break
        return refused

    def recover(self, refused: Sequence[bytes]) -> None:
        """Waits until the server is ready, repeats the refused uploads, and settles everything."""
        until(lambda: not not_ready(self._server), "the server to be ready again", self._server)
        self.trouble.alive = self._server.popen.poll() is None
        self.trouble.again = [self._upload(body)[1] for body in refused]
        while key := self._lease(wait_seconds=_LEASE_SECONDS + 1):  # also what is still leased from before
            self._ack(key)
        self.trouble.known = {batch["id"]: batch["state"] for batch in self._server.batches(run=self._run)}

    def close(self) -> None:
        self._http.close()

    def _ask_everything(self, held: Sequence[dict[str, str]]) -> None:
        """Sends every kind of request of a consumer."""
        extend, release, ack = held
        late = {"consumer": "late", "run": self._run, "lease_seconds": _LEASE_SECONDS, "wait_seconds": 0}
        requests = {
            "extend": lambda: self._post("/v1/leases/extend", {"leases": [extend], "lease_seconds": _LEASE_SECONDS}),
            "release": lambda: self._post("/v1/leases/release", {"leases": [release]}),
            "ack": lambda: self._ack(ack),
            "lease": lambda: self._post("/v1/batches/lease", late),
            "list": lambda: self._http.get("/v1/batches"),
            "queue": lambda: self._http.get("/v1/queue"),
            "livez": lambda: self._http.get("/livez"),
        }  # fmt: skip
        self.trouble.answers += [(what, ask().status_code) for what, ask in requests.items()]

    def _upload(self, body: bytes | None = None) -> tuple[bytes, int]:
        body = body or wire.encode(random_batch(self._chance, self._run, longest=40, completions=16))
        answer = self._http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})
        batch = wire.decode(body)
        assert isinstance(batch, RolloutBatch)
        (self.trouble.admitted if answer.is_success else self.trouble.refused).append(batch.id)
        return body, answer.status_code

    def _lease(self, wait_seconds: float) -> dict[str, str] | None:
        body = {"consumer": "witness", "run": self._run, "lease_seconds": _LEASE_SECONDS, "wait_seconds": wait_seconds}
        answer = self._post("/v1/batches/lease", body)
        if answer.status_code != 200:
            return None
        return {"id": answer.headers["Batch-Id"], "token": answer.headers["Lease-Token"]}

    def _ack(self, key: dict[str, str]) -> httpx.Response:
        answer = self._post("/v1/leases/ack", {"leases": [key]})
        outcome = answer.json()["results"][0]["outcome"] if answer.is_success else ""
        if outcome in ("ok", "already"):
            self.trouble.acked.append(key["id"])
        return answer

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body)


def not_ready(server: Server) -> str:
    """The reason that /readyz gives; empty if the server is ready or does not answer."""
    try:
        answer = httpx.get(server.url + "/readyz", timeout=30)
    except httpx.TransportError:
        return ""
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]
