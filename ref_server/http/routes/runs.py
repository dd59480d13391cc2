"""The metrics of runs, which trainers report and everyone else reads, and the end of a run."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated

from anyio import from_thread
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.errors import HttpError, no_room_to_answer
from ref_server.http.requests import Caller
from ref_server.http.routes.documents import PathInteger, errors
from ref_server.service.service import Service
from ref_server.service.views import TooWide, columns, is_cursor, page_of_runs, summarise
from shared.api import (
    LEGACY_RUN,
    FinishBody,
    Finished,
    Kind,
    MetricsBody,
    MetricsKept,
    RunMetrics,
    RunPage,
    RunSummary,
    StepRecords,
)
from shared.batch import LINEAGE, BatchError

# The most steps of one answer.
MOST_STEPS = 5000


async def _run(run: Annotated[str, Path(min_length=1, max_length=200)], caller: Caller) -> str:
    """The run that a path names. Raises Denied for a token of another run."""
    caller.only(run)
    return run


Run = Annotated[str, Depends(_run)]
LineageName = Annotated[
    str | None,
    Query(pattern=f"^({LINEAGE})?$", description="Without one, that which reported last; empty: that without a name."),
]
MetricName = Annotated[str, Field(min_length=1)]


def add(app: FastAPI, service: Service) -> None:
    _add_report(app, service)
    _add_runs(app, service)
    _add_curves(app, service)
    _add_step(app, service)
    _add_finish(app, service)


def _add_report(app: FastAPI, service: Service) -> None:
    @app.post("/v1/runs/{run}/metrics", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True)
    async def report(run: Run, body: MetricsBody) -> MetricsKept:
        """Keeps records of a run's metrics: one for each step, evaluation and warning, as in metrics.jsonl.

        The same record may be sent again. At most 4,096 of a kind are kept: of a longer run the newest 256, and every
        second, fourth, … of the older steps. They outlive the run by `--queue.retention-days`.

        ```
        curl localhost:8400/v1/runs/curl/metrics -H 'Content-Type: application/json' \\
            -d '{"records": [{"kind": "step", "step": 12, "reward": 0.4, "kl": 0.01}]}'
        ```
        """
        service.check_open()
        _check_name(run)
        keep = partial(service.queue.keep_metrics, run, body.lineage or "", body.records, body.after)
        await run_in_threadpool(keep)
        return MetricsKept(kept=len(body.records))


def _add_runs(app: FastAPI, service: Service) -> None:
    queue = service.queue

    @app.get("/v1/runs", responses=errors(503, 507))
    @requires(Role.TRAIN, confines=True)
    def runs(
        caller: Caller,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: Annotated[str | None, Query(max_length=500, description="`next_cursor` of the previous page.")] = None,
    ) -> RunPage:
        """The runs that have reported metrics, each of their lineages, the latest updated first.

        ```
        curl localhost:8400/v1/runs
        ```
        """
        if cursor is not None and not is_cursor(cursor):
            raise HttpError(422, "invalid_request", "cursor: must be a next_cursor that this server gave", "cursor")
        return page_of_runs(summarise(queue.curves(caller.only(None))), limit, cursor)


def _add_curves(app: FastAPI, service: Service) -> None:
    queue = service.queue

    @app.get("/v1/runs/{run}/metrics", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def curves(
        run: Run,
        request: Request,
        lineage: LineageName = None,
        kind: Kind = Kind.STEP,
        names: Annotated[list[MetricName], Query(description="Only these; all where none is given.")] = [],  # noqa: B006
        after: Annotated[int, Query(ge=-1, lt=2**63, description="Only later steps.")] = -1,
        limit: Annotated[int, Query(ge=1, le=MOST_STEPS, description="The most steps.")] = 2000,
    ) -> RunMetrics:
        """The numbers that a run has reported, as columns, by step.

        ```
        curl 'localhost:8400/v1/runs/curl/metrics?names=reward&names=kl&after=-1'
        ```
        """
        known = queue.curves(run)
        summary = _lineage(summarise(known), lineage)
        points = queue.metrics_page(run, summary.lineage, kind, after, limit)
        _check_room(request, (point.record for point in points))
        try:
            values = columns(points, names)
        except TooWide:
            message = "limit: too many values for one page: request fewer steps, or only some names"
            raise HttpError(422, "invalid_request", message, "limit") from None
        latest = max((curve.step for curve in known if curve.key == (run, summary.lineage, kind)), default=-1)
        return RunMetrics(
            run=run,
            lineage=summary.lineage,
            kind=kind,
            steps=[point.step for point in points],
            at=[point.at for point in points],
            values=values,
            next_after=points[-1].step if points and points[-1].step < latest else None,
        )


def _add_step(app: FastAPI, service: Service) -> None:
    queue = service.queue

    @app.get("/v1/runs/{run}/metrics/{step}", response_model=StepRecords, responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def step(
        run: Run, step: PathInteger, request: Request, lineage: LineageName = None, kind: Kind | None = None
    ) -> Response:
        """The whole records of one step, of all kinds or of one, with the ids of its batches.

        ```
        curl localhost:8400/v1/runs/curl/metrics/12
        ```
        """
        summary = _lineage(summarise(queue.curves(run)), lineage)
        records = queue.metrics_of_step(run, summary.lineage, step, kind)
        _check_room(request, records)
        if not records:
            raise HttpError(404, "not_found", f"no record of step {step} is kept: it may have been thinned out", "step")
        return Response(f'{{"records":[{",".join(records)}]}}', media_type=JSON)


def _check_name(run: str) -> None:
    if run == LEGACY_RUN or not run.isprintable():
        raise BatchError("run", f"must be printable and not {LEGACY_RUN!r}, got {run[:40]!r}")


def _lineage(lineages: list[RunSummary], lineage: str | None) -> RunSummary:
    """The requested lineage of a run, or the latest."""
    chosen = next((each for each in lineages if lineage in (None, each.lineage)), None)
    if chosen is None:
        what = "run" if lineage is None or not lineages else "lineage"
        raise HttpError(404, "not_found", f"no metrics of this {what} are kept here", what)
    return chosen


def _check_room(request: Request, records: Iterable[str]) -> None:
    if not from_thread.run_sync(request.state.room, sum(map(len, records))):
        raise no_room_to_answer()


def _add_finish(app: FastAPI, service: Service) -> None:
    @app.post("/v1/runs/{run}/finish", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True, audited=True)
    async def finish(run: Run, body: FinishBody) -> Finished:
        """Ends a run, after its last ack: what waits of it expires (reason `finished`), and what comes later.

        The next lease of the same lineage undoes that: the run goes on.

        ```
        curl localhost:8400/v1/runs/curl/finish -H 'Content-Type: application/json' -d '{}'
        ```
        """
        return Finished(expired=await run_in_threadpool(service.finish, run, body.lineage or ""))
