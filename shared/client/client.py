"""The client: a method for each route of the API, which builds the request and reads the answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import httpx

from shared import wire
from shared.api import (
    AckBody,
    Admitted,
    BatchDetails,
    BatchPage,
    BatchSummary,
    ExtendBody,
    LeaseBody,
    LeaseKey,
    LeaseResults,
    LeasesBody,
    ListOrder,
    ModelInfo,
    Outcome,
    PurgeBody,
    Purged,
    QueueView,
    ReferenceBody,
    ReferenceVersion,
    ReleaseBody,
    RewardsView,
    State,
    TokensView,
    Uploaded,
    UploadResults,
)
from shared.batch import Batch, BatchError, Training
from shared.client.connection import JSON, READ_SECONDS, ApiCall, as_record, no_answer, route
from shared.client.errors import ClientError, RefServerError, Unreachable, UnusableBatch
from shared.client.runs import RunsClient
from shared.client.scoring import BATCH_BYTES, BATCH_HEADERS, SCORING_SECONDS, ScoringClient, encoded

T = TypeVar("T")

# The most batches that the server lists in one response.
PAGE = 1000

# A healthy server answers a health check faster than this.
_HEALTH_SECONDS = 10.0
# A server that hangs must not block a display.
_GLANCE_SECONDS = 1.0
# A server that hangs must not block a trainer that reports its samples.
_TRAINING_SECONDS = 5.0
# Leases in one request, so that its body stays small.
_LEASES_AT_ONCE = 1000

Outcomes = dict[str, Outcome]


@dataclass(frozen=True, eq=False)
class Leased:
    """A leased batch. token: proves the lease. deliveries: those counted before, plus one."""

    batch: Batch
    id: str
    token: str
    deliveries: int


# Either has the id and the token of a lease.
LeasedOrUnusable = Leased | UnusableBatch


class RefServerClient(RunsClient, ScoringClient):
    """A connection to one reference server. Safe to share between threads.

    token: sent with each request. ca: a PEM file with the certificates of a private CA, for https. patience: seconds to
    keep retrying while the server is down, starting, full or failing; 0 tries once, None never gives up. on_wait:
    called before each retry with the reason and the seconds so far; an exception from it ends the wait. hint: ends
    the reason where no server answers, such as how to start one. Errors of the caller are raised at once. Every method
    raises RefServerError, Unreachable, NotRefServer, which are all ClientError.

    ```
    with RefServerClient("https://gpu1:8400", token=os.environ["TOKEN"], ca="ca.pem") as client:
        print(client.logprobs("2+3=", ["5", "6"]).logprobs)
    ```
    """

    # The server as a whole.

    def not_ready_reason(self) -> str | None:
        """Why the server would not score a batch now, or None. Tries once; no answer means not ready."""
        try:
            return self._send_once(ApiCall("GET", "/readyz", no_answer, read_seconds=_HEALTH_SECONDS))
        except RefServerError as error:
            if error.status >= 500:
                return error.message
            raise
        except Unreachable as error:
            if error.passes:
                return str(error)
            raise

    def model(self) -> ModelInfo:
        """The reference model, and what a policy trained against it must match."""
        return self._get("/v1/model", ModelInfo)

    def queue(self, run: str | None = None) -> QueueView:
        """Counts and bytes by run and state, limits, and the scorer's throughput. run: only this one.

        Without a run: the first thousand.
        """
        return self._get("/v1/queue", QueueView, run=run)

    def glance(self, run: str | None = None) -> QueueView | None:
        """Like `queue`, but tries once; None without an answer within a second. For displays, which must not wait."""
        queue = ApiCall("GET", "/v1/queue", as_record(QueueView), params={"run": run}, read_seconds=_GLANCE_SECONDS)
        try:
            return self._send_once(queue)
        except ClientError:
            return None

    def check_train_role(self) -> None:
        """Raises RefServerError with status 401 or 403 unless the token may lease batches and ack them."""
        self._post("/v1/leases/extend", ExtendBody(leases=[]), LeaseResults)

    def check_reference_role(self) -> None:
        """Raises RefServerError with status 401 or 403 unless the token may replace the reference."""
        # The server checks the token first, and then refuses this body, which names no snapshot, with 422.
        nothing = ApiCall("PUT", "/v1/reference", as_record(ReferenceVersion), b"{}", JSON)
        try:
            self._send(nothing)
        except RefServerError as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                raise

    def replace_reference(self, snapshot: str | None, version: int) -> ReferenceVersion:
        """Makes the server score with the weights of another snapshot: a name below its root, or None."""
        body = ReferenceBody(snapshot=snapshot, version=version).model_dump_json().encode()
        read = as_record(ReferenceVersion)
        return self._send(ApiCall("PUT", "/v1/reference", read, body, JSON, read_seconds=SCORING_SECONDS))

    # Uploads and leases.

    def upload(self, batch: Batch | bytes) -> Uploaded:
        """Uploads a batch, or its encoded bytes. Returns once it is stored durably. Waits while the queue is full."""

        def read(response: httpx.Response) -> Uploaded:
            admitted = Admitted.model_validate_json(response.content)
            created = response.status_code == httpx.codes.CREATED
            return Uploaded(id=admitted.id, state=admitted.state, created=created)

        return self._send(ApiCall("POST", "/v1/batches", read, encoded(batch), BATCH_HEADERS))

    def upload_several(self, batches: Sequence[Batch | bytes]) -> list[Uploaded | RefServerError]:
        """Uploads small batches in one request: at most MAX_UPLOADS of them, of MAX_UPLOADS_BYTES together.

        Returns the result of each, or why the server refuses it. Waits while the queue is full, as `upload` does.
        """
        bodies = [encoded(batch) for batch in batches]
        uploaded = self._upload_together(bodies) if len(bodies) > 1 else [None] * len(bodies)
        results: list[Uploaded | RefServerError] = []
        for body, result in zip(bodies, uploaded, strict=True):
            try:
                results.append(result or self.upload(body))  # which waits, or raises the batch's own error
            except RefServerError as error:
                results.append(error)
        return results

    def _upload_together(self, bodies: Sequence[bytes]) -> list[Uploaded | None]:
        """The batches that were admitted, None for the others."""

        def read(response: httpx.Response) -> list[Uploaded | None]:
            results = UploadResults.model_validate_json(response.content).results
            if len(results) != len(bodies):
                raise ValueError(f"it has {len(results)} results of {len(bodies)} batches")
            return [result.uploaded for result in results]

        headers = {"Content-Type": wire.UPLOADS_CONTENT_TYPE}
        return self._send(ApiCall("POST", "/v1/batches", read, wire.encode_uploads(bodies), headers))

    def lease(self, terms: LeaseBody) -> Leased | None:
        """Leases one batch; None if none came within terms.wait_seconds. A retried request gets the same batch.

        Raises UnusableBatch if a value of the batch is invalid; release it.

        ```
        leased = client.lease(LeaseBody(consumer="me", run="by-hand", wait_seconds=20, lease_seconds=120))
        ```
        """
        if terms.count is not None:
            raise ValueError("count: leases of several batches are `lease_many`'s")

        def read(response: httpx.Response) -> Leased | UnusableBatch | None:
            if response.status_code == httpx.codes.NO_CONTENT:
                return None
            headers = response.headers
            return _leased(response.content, headers["Batch-Id"], headers["Lease-Token"], int(headers["Deliveries"]))

        leased = self._lease(terms, read)
        if isinstance(leased, UnusableBatch):
            raise leased
        return leased

    def lease_many(self, terms: LeaseBody) -> list[LeasedOrUnusable]:
        """Leases up to terms.count batches, and returns as soon as one is ready; none within terms.wait_seconds: [].

        A batch with an invalid value is in the list as an UnusableBatch; release it with an error.

        ```
        leases = client.lease_many(LeaseBody(consumer="me", run="by-hand", count=64, wait_seconds=20))
        batches = [leased for leased in leases if isinstance(leased, Leased)]
        ```
        """

        def read(response: httpx.Response) -> list[LeasedOrUnusable]:
            if response.status_code == httpx.codes.NO_CONTENT:
                return []
            heads = wire.decode_leases(response.content)
            return [_leased(body, head.id, head.token, head.deliveries) for head, body in heads]

        return self._lease(terms.model_copy(update={"count": terms.most}), read)

    def ack(self, leases: Sequence[Leased], checkpoint: str | None = None) -> Outcomes:
        """Settles batches whose effect is in a durable checkpoint. Outcomes by id."""
        return self._settle("ack", AckBody, leases, checkpoint=checkpoint)

    def extend(self, leases: Sequence[Leased], lease_seconds: float, *, started: bool = False) -> Outcomes:
        """Heartbeat: makes leases end lease_seconds from now. started: training on them begins. Outcomes by id."""
        return self._settle("extend", ExtendBody, leases, lease_seconds=lease_seconds, started=started)

    def release(self, leases: Sequence[LeasedOrUnusable], *, error: str | None = None) -> Outcomes:
        """Gives batches back unused. An error counts as a failed delivery; too many end a batch. Outcomes by id."""
        return self._settle("release", ReleaseBody, leases, error=error)

    def put_training(self, id: str, training: Training) -> Admitted:
        """Stores training data with a leased batch; after its ack the server keeps the batch while it has room.

        Raises RefServerError 404, 409 if the batch is not leased, or its payload is gone.
        """
        content, path = wire.encode_training(training), route("batches", id, "training")
        return self._send(
            ApiCall("PUT", path, as_record(Admitted), content, BATCH_HEADERS, read_seconds=_TRAINING_SECONDS)
        )

    # Managing the queue.

    def batches(self, state: State | str | None = None, run: str | None = None) -> Iterator[BatchSummary]:
        """All batches, or those of a state or a run, in order of admission. Requests them page by page."""
        cursor: str | None = None
        while True:
            page = self.page(state, run, cursor=cursor)
            yield from page.batches
            cursor = page.next_cursor
            if cursor is None:
                return

    def page(
        self,
        state: State | str | None = None,
        run: str | None = None,
        *,
        limit: int = PAGE,
        cursor: str | None = None,
        order: ListOrder = ListOrder.OLDEST,
        kept: bool = False,
    ) -> BatchPage:
        """At most `limit` batches (1 to 1000), starting at `cursor`, the `next_cursor` of the previous page.

        The order must be that of the previous page. kept: only those whose payload is there.
        """
        only_kept = "true" if kept else None
        return self._get(
            "/v1/batches", BatchPage, state=state, run=run, limit=limit, cursor=cursor, order=order, kept=only_kept
        )

    def batch(self, id: str) -> BatchDetails:
        """State, history and shape of one batch."""
        return self._get(route("batches", id), BatchDetails)

    def tokens(self, id: str) -> TokensView:
        """The tokens of a batch with texts and log-probs, and each completion's rewards. For display."""
        path = route("batches", id, "tokens")
        return self._send(ApiCall("GET", path, as_record(TokensView), most=BATCH_BYTES))

    def image(self, id: str, number: int) -> bytes:
        """A picture of the prompt of a batch as a PNG file. number: from 0, below the `images` of its tokens."""
        return self._send(ApiCall("GET", route("batches", id, "images", str(number)), lambda answer: answer.content))

    def rewards(self, id: str) -> RewardsView:
        """The rewards of each completion of a batch. For display."""
        return self._get(route("batches", id, "rewards"), RewardsView)

    def requeue(self, id: str) -> Admitted:
        """Restores a dead or expired batch. Not retried when the server may have done it already."""
        # if the batch died again in between, a retry would requeue it a second time
        path = route("batches", id, "requeue")
        return self._send(ApiCall("POST", path, as_record(Admitted), repeatable=False))

    def drop(self, id: str) -> None:
        """Deletes the payload of a batch for good. Its id stays known."""
        self._send(ApiCall("DELETE", route("batches", id), no_answer))

    def purge(self, chosen: PurgeBody) -> Purged:
        """Drops the first of the chosen batches for good. Repeat with the result's next_cursor until that is None."""
        return self._post("/v1/batches/purge", chosen, Purged)

    # Shared by several methods.

    def _lease(self, terms: LeaseBody, read: Callable[[httpx.Response], T]) -> T:
        """Adds a request_id if the terms have none, so that a retry does not lease more batches."""
        body = terms.model_copy(update={"request_id": terms.request_id or uuid4().hex})
        content = body.model_dump_json(exclude_none=True).encode()
        seconds = terms.wait_seconds + READ_SECONDS
        return self._send(
            ApiCall("POST", "/v1/batches/lease", read, content, JSON, read_seconds=seconds, most=BATCH_BYTES)
        )

    def _settle(self, verb: str, body: type[LeasesBody], leases: Sequence[LeasedOrUnusable], **fields: Any) -> Outcomes:
        outcomes: Outcomes = {}
        for start in range(0, len(leases), _LEASES_AT_ONCE):
            keys = [LeaseKey(id=lease.id, token=lease.token) for lease in leases[start : start + _LEASES_AT_ONCE]]
            results = self._post(f"/v1/leases/{verb}", body(leases=keys, **fields), LeaseResults).results
            outcomes |= {result.id: result.outcome for result in results}
        return outcomes


def _leased(body: bytes, id: str, token: str, deliveries: int) -> LeasedOrUnusable:
    """Raises BatchError, a ValueError, for bytes that are no batch at all."""
    metadata, tensors = wire.parse(body)
    try:
        return Leased(wire.to_batch(metadata, tensors), id, token, deliveries)
    except BatchError as error:
        return UnusableBatch(id, token, error.field, str(error))
