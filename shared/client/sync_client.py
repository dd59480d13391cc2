"""The synchronous client."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import tenacity

from shared.api import (
    Admitted,
    BatchDetails,
    BatchPage,
    BatchSummary,
    Finished,
    Kind,
    LeaseBody,
    ListOrder,
    Logprobs,
    MetricsKept,
    ModelInfo,
    PurgeBody,
    Purged,
    QueueView,
    ReferenceVersion,
    RewardsView,
    RunMetrics,
    RunSummary,
    State,
    TokensView,
    Uploaded,
    WeightsFile,
    WeightsName,
    WeightsVersion,
)
from shared.batch import RolloutBatch, ScoredBatch
from shared.client import requests
from shared.client.connection import Connection, OnWait, unready_reason, wait_silently, whole
from shared.client.errors import ClientError, RefServerError, WrongContent
from shared.client.requests import Held, Leased, Outcomes, Request
from shared.client.transfers import Download, describe_file, pieces
from shared.training import Training

T = TypeVar("T")


class RefServerClient(Connection):
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

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        patience: float | None = 30.0,
        on_wait: OnWait = wait_silently,
        hint: str = "",
    ) -> None:
        super().__init__(url, token=token, ca=ca, patience=patience, on_wait=on_wait, hint=hint)
        with self.translating():
            self._http = httpx.Client(**self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def not_ready_reason(self) -> str | None:
        """Why the server would not score a batch now, or None. Tries once; no answer means not ready."""
        try:
            return self._send_once(requests.not_ready_reason())
        except ClientError as error:
            return unready_reason(error)

    def model(self) -> ModelInfo:
        """The reference model, and what a policy trained against it must match."""
        return self._send(requests.model())

    def queue(self, run: str | None = None) -> QueueView:
        """Counts and bytes by run and state, limits, and the scorer's throughput. run: tell of this one alone.

        Without one it tells of the first thousand.
        """
        return self._send(requests.queue(run))

    def glance(self, run: str | None = None) -> QueueView | None:
        """Like `queue`, but tries once; None without an answer within a second. For displays, which must not wait."""
        try:
            return self._send_once(requests.glance(run))
        except ClientError:
            return None

    def check_train_role(self) -> None:
        """Raises RefServerError, of status 401 or 403, unless the token may lease batches and ack them."""
        self._send(requests.check_train_role())

    def check_reference_role(self) -> None:
        """Raises RefServerError, of status 401 or 403, unless the token may replace the reference."""
        try:
            self._send(requests.check_reference_role())
        except RefServerError as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                raise

    def upload(self, batch: RolloutBatch | bytes) -> Uploaded:
        """Uploads a batch, or its encoded bytes. Returns once it is stored durably. Waits while the queue is full."""
        return self._send(requests.upload(batch))

    def lease(self, terms: LeaseBody) -> Leased | None:
        """Leases one batch; None if none came within terms.wait_seconds. A retried request gets the same batch.

        Raises UnusableBatch for one with a value that no batch may have, such as from an older store; release it.

        ```
        leased = client.lease(LeaseBody(consumer="me", run="by-hand", wait_seconds=20, lease_seconds=120))
        ```
        """
        return self._send(requests.lease(terms))

    def lease_many(self, terms: LeaseBody) -> list[Held]:
        """Leases up to terms.count batches; none if none came within terms.wait_seconds. It waits for the first alone.

        A batch with a value that no batch may have stands there as an UnusableBatch; release it with an error.

        ```
        held = client.lease_many(LeaseBody(consumer="me", run="by-hand", count=64, wait_seconds=20))
        batches = [leased for leased in held if isinstance(leased, Leased)]
        ```
        """
        return self._send(requests.lease_many(terms))

    def ack(self, leases: Sequence[Leased], checkpoint: str | None = None) -> Outcomes:
        """Settles batches whose effect is in a durable checkpoint. Outcomes by id."""
        return self._send_all(requests.ack(leases, checkpoint))

    def extend(self, leases: Sequence[Leased], lease_seconds: float, *, started: bool = False) -> Outcomes:
        """Heartbeat: makes leases end lease_seconds from now. started: training on them begins. Outcomes by id."""
        return self._send_all(requests.extend(leases, lease_seconds, started))

    def release(self, leases: Sequence[Held], *, error: str | None = None) -> Outcomes:
        """Gives batches back unused. An error counts as a failed delivery; too many end a batch. Outcomes by id."""
        return self._send_all(requests.release(leases, error))

    def finish_run(self, run: str, lineage: str = "") -> Finished:
        """Tells the server that a run is over: what waits of it expires, and what is still uploaded."""
        return self._send(requests.finish_run(run, lineage))

    def report_metrics(
        self,
        run: str,
        records: Sequence[Mapping[str, Any]],
        *,
        lineage: str = "",
        after: int | None = None,
        read_seconds: float = 60,
    ) -> MetricsKept:
        """Reports records of a run's metrics, 1 to 256: one for each step, evaluation and warning, as in metrics.jsonl.

        after: first forgets what this lineage reported of later steps. read_seconds: how long the server may take.
        Raises ValueError for a value that JSON does not have, such as NaN.

        ```
        client.report_metrics("by-hand", [{"kind": "step", "step": 1, "reward": 0.5}])
        ```
        """
        return self._send(requests.report_metrics(run, records, lineage, after, read_seconds))

    def runs(self) -> Iterator[RunSummary]:
        """The lineages of runs that have reported metrics, the latest updated first. Requests them page by page."""
        cursor: str | None = None
        while True:
            page = self._send(requests.runs(cursor))
            yield from page.runs
            cursor = page.next_cursor
            if cursor is None:
                return

    def run_metrics(
        self,
        run: str,
        names: Sequence[str] = (),
        *,
        kind: Kind = Kind.STEP,
        lineage: str | None = None,
        after: int = -1,
        limit: int = 2000,
    ) -> RunMetrics:
        """The numbers of a run as columns: of its steps, of at most `limit` after `after`; all where none is named.

        lineage: which training of that name; by default the one that reported last. Raises RefServerError 404.
        """
        return self._send(requests.run_metrics(run, kind, names, lineage, after, limit))

    def step_records(self, run: str, step: int, lineage: str | None = None) -> list[dict[str, Any]]:
        """The whole records of one step, of all kinds. Raises RefServerError 404."""
        return self._send(requests.step_records(run, step, lineage))

    def logprobs(self, prompt: str, completions: Sequence[str], *, temperature: float = 1.0) -> Logprobs:
        """Scores texts now. Each is tokenised alone, without special tokens. The server stores nothing."""
        return self._send(requests.logprobs(prompt, completions, temperature))

    def logprobs_of_ids(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Logprobs:
        """Scores token ids now. The server stores nothing."""
        return self._send(requests.logprobs_of_ids(prompt_ids, completions, temperature))

    def score(self, batch: RolloutBatch | bytes) -> ScoredBatch:
        """Scores a whole batch now, at its own temperature. The server stores nothing."""
        return self._send(requests.score(batch))

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
        limit: int = requests.PAGE,
        cursor: str | None = None,
        order: ListOrder = ListOrder.OLDEST,
        kept: bool = False,
    ) -> BatchPage:
        """At most `limit` batches (1 to 1000), starting at `cursor`, the `next_cursor` of the previous page.

        The order must be that of the previous page. kept: only those whose payload is there.
        """
        return self._send(requests.page(state, run, limit, cursor, order, kept))

    def batch(self, id: str) -> BatchDetails:
        """State, history and shape of one batch."""
        return self._send(requests.batch(id))

    def tokens(self, id: str) -> TokensView:
        """The tokens of a batch with texts and log-probs, and each completion's rewards. For display."""
        return self._send(requests.tokens(id))

    def rewards(self, id: str) -> RewardsView:
        """The rewards of each completion of a batch. For display."""
        return self._send(requests.rewards(id))

    def put_training(self, id: str, training: Training) -> Admitted:
        """Tells what training made of a leased batch, which keeps its payload after its ack while the server has room.

        Raises RefServerError 404, 409 if the batch is not leased, or its payload is gone.
        """
        return self._send(requests.put_training(id, training))

    def requeue(self, id: str) -> Admitted:
        """Restores a dead or expired batch. Not retried when the server may have done it already."""
        return self._send(requests.requeue(id))

    def drop(self, id: str) -> None:
        """Deletes the payload of a batch for good. Its id stays known."""
        self._send(requests.drop(id))

    def purge(self, chosen: PurgeBody) -> Purged:
        """Drops the first of the chosen batches for good. Ask again with the answer's next_cursor, until it is None."""
        return self._send(requests.purge(chosen))

    def replace_reference(self, snapshot: str | None, version: int) -> ReferenceVersion:
        """Makes the server score with the weights of another snapshot: a name below its root, or None."""
        return self._send(requests.replace_reference(snapshot, version))

    def put_weights(self, name: WeightsName, path: Path) -> WeightsFile:
        """Uploads one file of a version, from the disk; returns its length and SHA-256. Again is harmless.

        Raises OSError for a file that cannot be read.
        """
        content = describe_file(path)
        return self._send(requests.put_weights(name, path, content))

    def commit_weights(
        self, name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]
    ) -> WeightsVersion:
        """Publishes a version whose files were uploaded. words: what readers get with it, as JSON."""
        return self._send(requests.commit_weights(name, files, words))

    def newest_weights(
        self, run: str, lineage: str | None = None, *, after: tuple[int, int] | None = None, wait_seconds: float = 0
    ) -> WeightsVersion | None:
        """The newest version of a run: of a lineage, or of the one that committed last. None if there is none.

        after: only one newer than this epoch and version, for which it waits so many seconds.
        """
        return self._send(requests.newest_weights(run, lineage, after, wait_seconds))

    def weights(self, name: WeightsName) -> WeightsVersion:
        """One version, with its files. Raises RefServerError 404, 410."""
        return self._send(requests.weights(name))

    def download_weights(self, name: WeightsName, file: str, content: WeightsFile, target: Path) -> None:
        """Downloads a file of a version to `target`, which appears when it is whole and its SHA-256 right.

        A download that breaks off goes on where it was. Raises WrongContent for a file that came three times with other
        bytes, RefServerError 404, 410, OSError.
        """
        for left in reversed(range(requests.DOWNLOADS)):
            try:
                with Download(target, content) as download:
                    self._send(requests.weights_file(name, file, download))
                    download.finish()
                    return
            except WrongContent:
                if not left:
                    raise

    def _stream(self, source: Path) -> Iterator[bytes]:
        return pieces(source)

    def _send(self, request: Request[T]) -> T:
        for attempt in tenacity.Retrying(**self.retrying(request)):
            with attempt:
                return self._send_once(request)
        raise AssertionError("the last attempt raises")

    def _send_once(self, request: Request[T]) -> T:
        body = bytearray()
        with self.translating(), self._http.stream(**self.arguments(request)) as response:
            self.check_encoding(response)
            if request.sink and response.is_success:
                return self._receive(request, request.sink, response)
            for piece in response.iter_raw():
                self.collect(request, response, body, piece)
        return self.read(request, whole(response, body))

    def _receive(self, request: Request[T], sink: Download, response: httpx.Response) -> T:
        begun = self.read(request, response)
        for piece in response.iter_raw():
            sink.write(piece)
        return begun

    def _send_all(self, several: Sequence[Request[Outcomes]]) -> Outcomes:
        outcomes: Outcomes = {}
        for request in several:
            outcomes |= self._send(request)
        return outcomes
