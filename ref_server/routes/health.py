"""Is it up, is it ready, how does it do, and what model does it serve?"""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from ref_server.metrics import Metrics
from ref_server.problem import Problem
from ref_server.routes.documents import errors
from ref_server.service import Service
from shared.api import ModelInfo


def add(app: FastAPI, service: Service) -> None:
    metrics = Metrics(service)

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process is up. Wants no token.

        ```
        curl localhost:8400/livez
        ```
        """
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=errors(503))
    def readyz() -> str:
        """A batch would be scored now, or queued where there is no model; 503 tells why not. Wants no token.

        ```
        curl localhost:8400/readyz
        ```
        """
        reason = service.not_ready_reason()
        if reason:
            raise Problem(503, "not_ready", reason, headers={"Retry-After": "1"})
        return "ok"

    @app.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Prometheus text.

        ```
        curl localhost:8400/metrics
        ```
        """
        return Response(metrics.text(), media_type=metrics.content_type)

    @app.get("/v1/model", response_model=ModelInfo)
    async def model() -> dict[str, object]:
        """The reference model: what a client's own model must match.

        ```
        curl localhost:8400/v1/model
        ```
        """
        return service.model
