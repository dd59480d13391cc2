"""Routes for looking into one batch: its tokens, its rewards, and what training made of it."""

from functools import partial
from typing import Annotated, TypeVar

from anyio import from_thread
from fastapi import FastAPI, Path, Request

from ref_server.access.keys import Holder, Role
from ref_server.access.requirements import requires
from ref_server.http.asker import Asker, confine
from ref_server.http.problem import Problem, no_room_to_answer
from ref_server.http.routes.documents import errors
from ref_server.http.threads import BodyThreads
from ref_server.service.service import Service
from shared import wire
from shared.api import Admitted, BatchDetails, RewardsView, TokensView

T = TypeVar("T")

# A token takes about sixteen bytes of a payload, and with its text five times as much as JSON.
_TOKENS_GROWTH = 5

Id = Annotated[str, Path(description="The id that the batch was uploaded with.")]


def add(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    @app.get("/v1/batches/{id}/tokens", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def tokens(id: Id, asker: Asker, request: Request) -> TokensView:
        """For display: each token with its text, log-probs and advantage, each row with its rewards.

        ```
        curl localhost:8400/v1/batches/$ID/tokens
        ```
        """
        batch = _batch(service, asker, id)
        if not from_thread.run_sync(request.state.room, _TOKENS_GROWTH * batch.payload_bytes):
            raise no_room_to_answer()
        return found(service.describe_tokens(batch), id)

    @app.get("/v1/batches/{id}/rewards", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def rewards(id: Id, asker: Asker) -> RewardsView:
        """For histograms: the rewards of each completion, their parts, and the completions' lengths.

        ```
        curl localhost:8400/v1/batches/$ID/rewards
        ```
        """
        return found(service.describe_rewards(_batch(service, asker, id)), id)

    @app.put("/v1/batches/{id}/training", responses=errors(404, 409, 503, 507))
    @requires(Role.TRAIN, wire.CONTENT_TYPE, confines=True)
    async def training(id: Id, asker: Asker, request: Request) -> Admitted:
        """What training made of a leased batch, which then keeps its payload after its ack (`--queue.keep-samples`).

        A safetensors file of float32 (C,) `advantages`, 0 where a token did not train, and `logps` of the policy after
        the step at the batch's temperature; its metadata are `format` = `training/1` and `step`. Again replaces it.

        ```
        curl -X PUT localhost:8400/v1/batches/$ID/training -H 'Content-Type: application/vnd.safetensors' \\
            --data-binary @training.safetensors
        ```
        """
        return await threads.run(partial(_keep_training, service, asker, id, await request.body()))


def found(value: T | None, id: str) -> T:
    """Raises Problem 404 for None."""
    if value is None:
        raise Problem(404, "not_found", f"no batch {id[:80]!r} is known here, or its payload is gone", "id")
    return value


def _keep_training(service: Service, asker: Holder, id: str, body: bytes) -> Admitted:
    batch = _batch(service, asker, id)
    service.keep_training(batch, body)
    return Admitted(id=id, state=batch.state)


def _batch(service: Service, asker: Holder, id: str) -> BatchDetails:
    confine(asker, service.queue, [id])
    return found(service.queue.get(id), id)
