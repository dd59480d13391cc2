"""Routes that describe the reference model and replace its weights."""

from fastapi import FastAPI, Request

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.asker import note
from ref_server.http.routes.documents import errors
from ref_server.service.service import Service
from shared.api import Error, ModelInfo, ReferenceBody, ReferenceVersion

_NO_SNAPSHOT = {404: {"model": Error, "description": "no such snapshot"}}


def add(app: FastAPI, service: Service) -> None:
    @app.get("/v1/model")
    @requires(Role.UPLOAD, confines=True)
    async def model() -> ModelInfo:
        """The reference model: what a client's own model must match.

        ```
        curl localhost:8400/v1/model
        ```
        """
        return service.model

    @app.put("/v1/reference", responses={**_NO_SNAPSHOT, **errors(409, 503)})
    @requires(Role.ADMIN, JSON, audited=True)
    def replace(body: ReferenceBody, request: Request) -> ReferenceVersion:
        """Replaces the reference's weights by a snapshot below `--snapshot-root`, of the same architecture.

        The current batch is finished first; every later one is scored with the new weights and carries their
        version. A higher version replaces a lower one; repeating a request is harmless. Without a snapshot the weights
        of `--model` are put back. The queue keeps which reference it wants: a restarted server has it again, and
        every other server on the same queue follows within a second and the time that it takes to load. Until then
        such a server claims no batches, and `/readyz` answers 503.

        ```
        curl -X PUT localhost:8400/v1/reference -H 'Content-Type: application/json' \\
            -d '{"snapshot": "step-200", "version": 1}'
        ```
        """
        note(request, snapshot=body.snapshot, version=body.version)
        return ReferenceVersion(reference_version=service.replace_reference(body.snapshot, body.version))
