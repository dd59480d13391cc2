"""The end of a run."""

from typing import Annotated

from fastapi import FastAPI, Path
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.asker import Asker
from ref_server.http.routes.documents import errors
from ref_server.service.service import Service
from shared.api import FinishBody, Finished


def add(app: FastAPI, service: Service) -> None:
    @app.post("/v1/runs/{run}/finish", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True, audited=True)
    async def finish(
        run: Annotated[str, Path(min_length=1, max_length=200)], body: FinishBody, asker: Asker
    ) -> Finished:
        """Ends a run, after its last ack: what waits of it expires (reason `finished`), and what comes later.

        The next lease of the same lineage undoes that: the run goes on.

        ```
        curl localhost:8400/v1/runs/curl/finish -H 'Content-Type: application/json' -d '{}'
        ```
        """
        asker.only(run)
        return Finished(expired=await run_in_threadpool(service.finish, run, body.lineage or ""))
