"""Is it up, is it ready, how does it do, and what model does it serve?"""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from ref_server.http.patience import Question
from ref_server.http.problem import Problem
from ref_server.http.routes.documents import errors
from ref_server.metrics.page import Metrics
from ref_server.service.service import Service
from shared.api import ModelInfo

# A store that is silent for so many seconds is not ready.
_PATIENCE = 5.0


def add(app: FastAPI, service: Service) -> None:
    metrics = Metrics(service, app.state.traffic)
    readiness = Question(service.not_ready_reason)

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process is up. Wants no token.

        ```
        curl localhost:8400/livez
        ```
        """
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=errors(503))
    async def readyz() -> str:
        """A batch would be scored now, or queued where there is no model; 503 tells why not. Wants no token.

        ```
        curl localhost:8400/readyz
        ```
        """
        try:
            reason = await readiness.answer(_PATIENCE)
        except TimeoutError:
            reason = f"the queue has not answered for {_PATIENCE:g} s"
        if reason:
            raise Problem(503, "not_ready", reason, headers={"Retry-After": "1"})
        return "ok"

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus text. Counters count since the start of this process; without a store it is told without depths.

        ```
        curl localhost:8400/metrics
        ```
        """
        return Response(await metrics.text(), media_type=metrics.content_type)

    @app.get("/v1/model", response_model=ModelInfo)
    async def model() -> dict[str, object]:
        """The reference model: what a client's own model must match.

        ```
        curl localhost:8400/v1/model
        ```
        """
        return service.model
