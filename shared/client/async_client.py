"""The asynchronous client."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import tenacity
from anyio import to_thread

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
from shared.client.transfers import Download, async_pieces, describe_file
from shared.training import Training

T = TypeVar("T")


class AsyncRefServerClient(Connection):
    """RefServerClient for asyncio and trio. `RefServerClient` documents the arguments and methods, which are the same.

    Share one client between the tasks of an event loop. A cancelled task sends nothing more. A lease
    that was on its way to it expires.

    ```
    async with AsyncRefServerClient("http://127.0.0.1:8400") as client:
        scored = await asyncio.gather(*(client.score(batch) for batch in batches))
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
            self._http = httpx.AsyncClient(**self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def not_ready_reason(self) -> str | None:
        try:
            return await self._send_once(requests.not_ready_reason())
        except ClientError as error:
            return unready_reason(error)

    async def model(self) -> ModelInfo:
        return await self._send(requests.model())

    async def queue(self, run: str | None = None) -> QueueView:
        return await self._send(requests.queue(run))

    async def glance(self, run: str | None = None) -> QueueView | None:
        try:
            return await self._send_once(requests.glance(run))
        except ClientError:
            return None

    async def check_train_role(self) -> None:
        await self._send(requests.check_train_role())

    async def check_reference_role(self) -> None:
        try:
            await self._send(requests.check_reference_role())
        except RefServerError as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                raise

    async def upload(self, batch: RolloutBatch | bytes) -> Uploaded:
        return await self._send(requests.upload(batch))

    async def lease(self, terms: LeaseBody) -> Leased | None:
        return await self._send(requests.lease(terms))

    async def lease_many(self, terms: LeaseBody) -> list[Held]:
        return await self._send(requests.lease_many(terms))

    async def ack(self, leases: Sequence[Leased], checkpoint: str | None = None) -> Outcomes:
        return await self._send_all(requests.ack(leases, checkpoint))

    async def extend(self, leases: Sequence[Leased], lease_seconds: float, *, started: bool = False) -> Outcomes:
        return await self._send_all(requests.extend(leases, lease_seconds, started))

    async def release(self, leases: Sequence[Held], *, error: str | None = None) -> Outcomes:
        return await self._send_all(requests.release(leases, error))

    async def finish_run(self, run: str, lineage: str = "") -> Finished:
        return await self._send(requests.finish_run(run, lineage))

    async def report_metrics(
        self,
        run: str,
        records: Sequence[Mapping[str, Any]],
        *,
        lineage: str = "",
        after: int | None = None,
        read_seconds: float = 60,
    ) -> MetricsKept:
        return await self._send(requests.report_metrics(run, records, lineage, after, read_seconds))

    async def runs(self) -> AsyncIterator[RunSummary]:
        cursor: str | None = None
        while True:
            page = await self._send(requests.runs(cursor))
            for run in page.runs:
                yield run
            cursor = page.next_cursor
            if cursor is None:
                return

    async def run_metrics(
        self,
        run: str,
        names: Sequence[str] = (),
        *,
        kind: Kind = Kind.STEP,
        lineage: str | None = None,
        after: int = -1,
        limit: int = 2000,
    ) -> RunMetrics:
        return await self._send(requests.run_metrics(run, kind, names, lineage, after, limit))

    async def step_records(self, run: str, step: int, lineage: str | None = None) -> list[dict[str, Any]]:
        return await self._send(requests.step_records(run, step, lineage))

    async def logprobs(self, prompt: str, completions: Sequence[str], *, temperature: float = 1.0) -> Logprobs:
        return await self._send(requests.logprobs(prompt, completions, temperature))

    async def logprobs_of_ids(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Logprobs:
        return await self._send(requests.logprobs_of_ids(prompt_ids, completions, temperature))

    async def score(self, batch: RolloutBatch | bytes) -> ScoredBatch:
        return await self._send(requests.score(batch))

    async def batches(self, state: State | str | None = None, run: str | None = None) -> AsyncIterator[BatchSummary]:
        cursor: str | None = None
        while True:
            page = await self.page(state, run, cursor=cursor)
            for batch in page.batches:
                yield batch
            cursor = page.next_cursor
            if cursor is None:
                return

    async def page(
        self,
        state: State | str | None = None,
        run: str | None = None,
        *,
        limit: int = requests.PAGE,
        cursor: str | None = None,
        order: ListOrder = ListOrder.OLDEST,
        kept: bool = False,
    ) -> BatchPage:
        return await self._send(requests.page(state, run, limit, cursor, order, kept))

    async def batch(self, id: str) -> BatchDetails:
        return await self._send(requests.batch(id))

    async def tokens(self, id: str) -> TokensView:
        return await self._send(requests.tokens(id))

    async def rewards(self, id: str) -> RewardsView:
        """The rewards of each completion of a batch. For display."""
        return await self._send(requests.rewards(id))

    async def put_training(self, id: str, training: Training) -> Admitted:
        """Tells what training made of a leased batch, which keeps its payload after its ack while the server has room.

        Raises RefServerError 404, 409 if the batch is not leased, or its payload is gone.
        """
        return await self._send(requests.put_training(id, training))

    async def requeue(self, id: str) -> Admitted:
        return await self._send(requests.requeue(id))

    async def drop(self, id: str) -> None:
        await self._send(requests.drop(id))

    async def purge(self, chosen: PurgeBody) -> Purged:
        return await self._send(requests.purge(chosen))

    async def replace_reference(self, snapshot: str | None, version: int) -> ReferenceVersion:
        return await self._send(requests.replace_reference(snapshot, version))

    async def put_weights(self, name: WeightsName, path: Path) -> WeightsFile:
        content = await to_thread.run_sync(describe_file, path)
        return await self._send(requests.put_weights(name, path, content))

    async def commit_weights(
        self, name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]
    ) -> WeightsVersion:
        return await self._send(requests.commit_weights(name, files, words))

    async def newest_weights(
        self, run: str, lineage: str | None = None, *, after: tuple[int, int] | None = None, wait_seconds: float = 0
    ) -> WeightsVersion | None:
        return await self._send(requests.newest_weights(run, lineage, after, wait_seconds))

    async def weights(self, name: WeightsName) -> WeightsVersion:
        return await self._send(requests.weights(name))

    async def download_weights(self, name: WeightsName, file: str, content: WeightsFile, target: Path) -> None:
        for left in reversed(range(requests.DOWNLOADS)):
            try:
                with Download(target, content) as download:
                    await self._send(requests.weights_file(name, file, download))
                    await to_thread.run_sync(download.finish)
                    return
            except WrongContent:
                if not left:
                    raise

    def _stream(self, source: Path) -> AsyncIterator[bytes]:
        return async_pieces(source)

    async def _send(self, request: Request[T]) -> T:
        async for attempt in tenacity.AsyncRetrying(**self.retrying(request)):
            with attempt:
                return await self._send_once(request)
        raise AssertionError("the last attempt raises")

    async def _send_once(self, request: Request[T]) -> T:
        body = bytearray()
        with self.translating():
            async with self._http.stream(**self.arguments(request)) as response:
                self.check_encoding(response)
                if request.sink and response.is_success:
                    return await self._receive(request, request.sink, response)
                async for piece in response.aiter_raw():
                    self.collect(request, response, body, piece)
        return self.read(request, whole(response, body))

    async def _receive(self, request: Request[T], sink: Download, response: httpx.Response) -> T:
        begun = self.read(request, response)
        async for piece in response.aiter_raw():
            await to_thread.run_sync(sink.write, piece)
        return begun

    async def _send_all(self, several: Sequence[Request[Outcomes]]) -> Outcomes:
        outcomes: Outcomes = {}
        for request in several:
            outcomes |= await self._send(request)
        return outcomes
