"""Routes that say whether the server is up and ready and how fast it works, and the page that Prometheus scrapes.

While the store cannot be read that page leaves out the depths of the queue, and `tandem_store_up` is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.http.errors import HttpError
from ref_server.http.routes.documents import errors
from ref_server.http.shared_call import SharedCall
from ref_server.metrics import Traffic
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.records import DiskSpace, Stats
from ref_server.service import gauges
from ref_server.service.service import Service
from ref_server.service.throughput import DAY, HOUR
from shared.api import ThroughputView

# Seconds after which a store that does not answer counts as not ready, and a scrape goes on without it. Prometheus
# itself gives up after ten.
TIMEOUT = 5.0
# A check of the store flushes the disk, and nobody needs a token to ask: so it is made at most once a second.
_FRESH_SECONDS = 1.0


def add(app: FastAPI, service: Service, traffic: Traffic) -> None:
    _add_health(app, service)
    _add_metrics(app, service, traffic)

    @app.get("/v1/throughput")
    @requires(Role.UPLOAD, confines=True)
    async def throughput(
        seconds: Annotated[int, Query(ge=1, le=DAY, description="How far back.")] = HOUR,
    ) -> ThroughputView:
        """Tokens scored, and batches uploaded and taken, per second: in columns of at most about 360 entries.

        ```
        curl 'localhost:8400/v1/throughput?seconds=900'
        ```
        """
        return service.throughput.rates(seconds)


def _add_health(app: FastAPI, service: Service) -> None:
    store = SharedCall(service.broken_store_reason, fresh_seconds=_FRESH_SECONDS)

    @app.get("/livez", response_class=PlainTextResponse)
    @requires(Role.OPEN)
    async def livez() -> str:
        """The process is up. Needs no token.

        ```
        curl localhost:8400/livez
        ```
        """
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=errors(503))
    @requires(Role.OPEN)
    async def readyz() -> str:
        """A batch would be scored now, or queued where there is no model; 503 says why not. Needs no token.

        ```
        curl localhost:8400/readyz
        ```
        """
        try:
            reason = service.not_working_reason() or await store.result(TIMEOUT)
        except TimeoutError:
            reason = f"the queue has not answered for {TIMEOUT:g} s"
        if reason:
            raise HttpError(503, "not_ready", reason, headers={"Retry-After": "1"})
        return "ok"


def _add_metrics(app: FastAPI, service: Service, traffic: Traffic) -> None:
    metrics = Metrics(service, traffic)

    @app.get("/metrics", response_class=PlainTextResponse)
    @requires(Role.METRICS)
    async def prometheus() -> Response:
        """Prometheus text. Counters count since the start of this process. Without a store the depths are left out.

        ```
        curl localhost:8400/metrics
        ```
        """
        return Response(await metrics.text(), media_type=metrics.content_type)


@dataclass(frozen=True)
class _Store:
    """The store at this scrape. up: it could be written. stats, disk, weights: None when they are not known."""

    up: bool
    stats: Stats | None = None
    disk: DiskSpace | None = None
    weights: tuple[int, int] | None = None


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service, traffic: Traffic) -> None:
        self._service = service
        self._traffic = traffic
        self._store = SharedCall(lambda: _probe_store(service))
        self._process = ProcessCollector(registry=None)
        self._version = _version()
        disable_created_metrics()  # for the whole process; else each counter gets a second series

    async def text(self) -> bytes:
        try:
            store = await self._store.result(TIMEOUT)
        except TimeoutError:
            store = _Store(up=False)
        collected: Any = _Collected([*self._families(store), *self._process.collect()])
        return await run_in_threadpool(generate_latest, collected)

    def _families(self, store: _Store) -> Iterator[Metric]:
        service = self._service
        ready = store.up and service.not_working_reason() is None
        yield from gauges.server(
            self._version,
            ready,
            store.up,
            service.scores,
            service.reference.info,
            service.wanted_reference_version,
        )
        if store.stats:
            yield from gauges.depths(store.stats)
        if store.disk:
            yield from gauges.disk(store.disk)
        if store.weights:
            yield from gauges.weights(*store.weights)
        yield from gauges.limits(service.config.queue.limits)
        for part in (service.queue.activity, service.scoring.totals, service.weights.store.traffic, self._traffic):
            yield from part.registry.collect()


@dataclass(frozen=True)
class _Collected:
    """A registry for `generate_latest`."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def _probe_store(service: Service) -> _Store:
    queue = service.queue
    try:
        queue.check()
        up = True
    except StorageFull:
        up = False
    except StorageBroken:
        return _Store(up=False)
    try:
        return _Store(up, queue.stats(), queue.disk(), service.weights.store.held())
    except (StorageFull, StorageBroken):
        return _Store(up=False)


def _version() -> str:
    try:
        return version("tandem-grpo")
    except PackageNotFoundError:  # run from its source
        return "unknown"
