"""The only file that speaks HTTP to the reference server.

Every call is idempotent, so every call is repeated until the server answers: with backoff while it is down, starting,
restarting or full, and saying so. What the caller did wrong is raised.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import stamina

from shared import wire
from shared.batch import RolloutBatch, ScoredBatch

# Told why there is no answer yet, and for how many seconds so far. May raise to give up.
OnWait = Callable[[str, float], None]

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_MAX_BACKOFF_SECONDS = 2.0
_KEYS_AT_ONCE = 1000


class RefServerError(Exception):
    """The server refused a request; repeating it would not help. status: of HTTP. field: what was wrong, if known."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(f"the reference server answered {status}: {message}")
        self.status = status
        self.field = field


def batches_by_state(queue: Mapping[str, Any], run: str) -> Counter[str]:
    """How many batches of a run are in each state, from what `RefServerClient.queue` tells; 0 where there are none."""
    return Counter({state: depth["batches"] for state, depth in queue["runs"].get(run, {}).items()})


def in_flight_allowance(queue: Mapping[str, Any]) -> int:
    """How many batches one run may hold leased and not yet acked, from what `RefServerClient.queue` tells."""
    return min(queue["limits"]["max_in_flight"], queue["limits"]["max_in_flight_per_run"])


def leases_are_full(queue: Mapping[str, Any], run: str) -> bool:
    """Whether the server leases a run nothing more until something is settled, from what `queue` tells."""
    limits, leased = queue["limits"], queue["states"]["leased"]["batches"]
    of_run = batches_by_state(queue, run)["leased"]
    return leased >= limits["max_in_flight"] or of_run >= limits["max_in_flight_per_run"]


@dataclass(frozen=True)
class LeaseTerms:
    """Which batches a consumer wants: the same for every lease of one life of it. order: fifo or freshest."""

    consumer: str
    run: str
    epoch: int
    max_lag: int | None
    lease_seconds: float
    order: str = "fifo"
    incarnation: str = field(default_factory=lambda: uuid4().hex)


@dataclass(frozen=True, eq=False)
class Leased:
    """One batch and the proof that it is ours."""

    batch: RolloutBatch | ScoredBatch
    id: str
    token: str
    deliveries: int

    @property
    def rollout(self) -> RolloutBatch:
        return self.batch.rollout if isinstance(self.batch, ScoredBatch) else self.batch


class RefServerClient:
    """A connection to one reference server. Safe to share between threads."""

    def __init__(self, url: str, *, on_wait: OnWait) -> None:
        stamina.instrumentation.set_on_retry_hooks(())  # on_wait tells of retries, in its own words
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS))
        self._on_wait = on_wait

    def close(self) -> None:
        self._http.close()

    def model(self) -> dict[str, Any]:
        """What `GET /v1/model` tells of the reference model."""
        return self._request("GET", "/v1/model").json()

    def queue(self) -> dict[str, Any]:
        """Counts by state and run, limits and the scorer's throughput."""
        return self._request("GET", "/v1/queue").json()

    def glance(self) -> dict[str, Any] | None:
        """The same, asked once; None when there is no answer. For looking, where nobody should wait."""
        try:
            return self._http.get("/v1/queue").raise_for_status().json()
        except httpx.HTTPError:
            return None

    def upload(self, body: bytes) -> None:
        """Uploads an encoded rollout batch; returns once it is durable there. Waits while the queue is full."""
        self._request("POST", "/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})

    def lease(self, terms: LeaseTerms, *, policy_version: int, wait_seconds: float) -> Leased | None:
        """One batch, or None when none came within wait_seconds. A lost answer strands nothing: the id repeats it."""
        asked = {
            "consumer": terms.consumer,
            "incarnation": terms.incarnation,
            "request_id": uuid4().hex,
            "run": terms.run,
            "epoch": terms.epoch,
            "policy_version": policy_version,
            "max_lag": terms.max_lag,
            "order": terms.order,
            "wait_seconds": wait_seconds,
            "lease_seconds": terms.lease_seconds,
        }
        answer = self._request("POST", "/v1/batches/lease", json=asked)
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        headers = answer.headers
        return Leased(
            wire.decode(answer.content), headers["Batch-Id"], headers["Lease-Token"], int(headers["Deliveries"])
        )

    def ack(self, leases: Sequence[Leased], checkpoint: str) -> dict[str, str]:
        """Settles batches whose effect a durable checkpoint holds. Outcomes by id."""
        return self._settle("ack", leases, checkpoint=checkpoint)

    def extend(self, leases: Sequence[Leased], lease_seconds: float, *, started: bool = False) -> dict[str, str]:
        """Heartbeat. `started` says that training on them begins. Outcomes by id."""
        return self._settle("extend", leases, lease_seconds=lease_seconds, started=started)

    def release(self, leases: Sequence[Leased], *, error: str | None = None) -> dict[str, str]:
        """Gives batches back unused; with an error they cannot be used, and die of it in the end. Outcomes by id."""
        return self._settle("release", leases, error=error)

    def _settle(self, verb: str, leases: Sequence[Leased], **extra: Any) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for start in range(0, len(leases), _KEYS_AT_ONCE):
            keys = [{"id": lease.id, "token": lease.token} for lease in leases[start : start + _KEYS_AT_ONCE]]
            answer = self._request("POST", f"/v1/leases/{verb}", json={"leases": keys, **extra})
            outcomes |= {result["id"]: result["outcome"] for result in answer.json()["results"]}
        return outcomes

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Repeats a request until it is answered by something other than an overload or an outage."""
        started = time.monotonic()

        def again(error: Exception) -> bool | float:
            reason = self._outage(error)
            if reason is None:
                return False
            self._on_wait(reason, time.monotonic() - started)
            return _retry_after(error)

        for attempt in stamina.retry_context(on=again, attempts=None, timeout=None, wait_max=_MAX_BACKOFF_SECONDS):
            with attempt:
                response = self._http.request(method, path, **content)
                if response.status_code == 429 or response.status_code >= 500:
                    response.raise_for_status()
                if response.is_error:
                    raise _refusal(response)
                return response
        raise AssertionError("the attempts are endless")

    def _outage(self, error: Exception) -> str | None:
        """What to tell of an error that passes by itself; None for one that does not."""
        if isinstance(error, httpx.HTTPStatusError):
            return f"the reference server at {self.url} says: {_refusal(error.response)}"
        if isinstance(error, httpx.UnsupportedProtocol):
            return None  # the URL is at fault, and stays so
        if isinstance(error, httpx.TransportError):
            return f"the reference server at {self.url} does not answer ({error})"
        return None


def _retry_after(error: Exception) -> bool | float:
    """The server's own wish, in seconds, else True for the usual backoff."""
    wish = error.response.headers.get("Retry-After", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return float(wish) if wish.isdecimal() else True


def _refusal(response: httpx.Response) -> RefServerError:
    try:
        error = response.json()["error"]
        return RefServerError(response.status_code, error["message"], error.get("field"))
    except (ValueError, KeyError, TypeError):
        return RefServerError(response.status_code, response.text[:200] or response.reason_phrase)
