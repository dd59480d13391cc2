"""Routes that tell whether the server is up, and whether it is ready."""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.http.problem import Problem
from ref_server.http.routes.documents import errors
from ref_server.http.shared_call import SharedCall
from ref_server.service.service import Service

# Seconds after which a store that does not answer counts as not ready.
_TIMEOUT = 5.0
# A check of the store flushes the disk, and nobody needs a token to ask: so it is made at most once a second.
_FRESH_SECONDS = 1.0


def add(app: FastAPI, service: Service) -> None:
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
            reason = service.not_working_reason() or await store.result(_TIMEOUT)
        except TimeoutError:
            reason = f"the queue has not answered for {_TIMEOUT:g} s"
        if reason:
            raise Problem(503, "not_ready", reason, headers={"Retry-After": "1"})
        return "ok"
