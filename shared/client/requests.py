"""The requests of the API, each with the function that parses its response. Both clients send them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
from pydantic import BaseModel

from shared import bundle, training, wire
from shared.api import (
    AckBody,
    Admitted,
    BatchDetails,
    BatchPage,
    CommitBody,
    ExtendBody,
    FinishBody,
    Finished,
    Key,
    Kind,
    LeaseBody,
    LeasesBody,
    ListOrder,
    Logprobs,
    LogprobsRequest,
    MetricsKept,
    ModelInfo,
    Outcome,
    PurgeBody,
    Purged,
    QueueView,
    ReferenceBody,
    ReferenceVersion,
    ReleaseBody,
    Results,
    RewardsView,
    RunMetrics,
    RunPage,
    State,
    StepRecords,
    TokenIds,
    TokensView,
    Uploaded,
    WeightsFile,
    WeightsName,
    WeightsVersion,
)
from shared.batch import BatchError, RolloutBatch, ScoredBatch
from shared.client.errors import UnusableBatch
from shared.client.transfers import Download, content_digest
from shared.training import Training

Outcomes = dict[str, Outcome]

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

_JSON = "application/json"
# The longest JSON answer, a page of 1,000 batches or 5,000 steps, has a few MiB.
JSON_BYTES = 64 * 2**20
# A lease has 64 MiB, or a single batch as long as the server's max_body_mib and its log-probs; its tokens as JSON take
# five times that. No legal answer comes near this.
_BATCH_BYTES = 2 * 2**30
_BYTES = "application/octet-stream"
_READ_SECONDS = 60.0
# Enough for a large batch on a slow machine, queued behind others.
_SCORING_SECONDS = 600.0
# A healthy server answers a health check faster than this.
_HEALTH_SECONDS = 10.0
# Whoever glances has other work: a server that hangs must not hold it up.
_GLANCE_SECONDS = 1.0
# A trainer that tells of its samples has other work, too.
_TRAINING_SECONDS = 5.0
_KEYS_AT_ONCE = 1000
# A file that came so often with wrong bytes is damaged where it is kept.
DOWNLOADS = 3
# The most batches the server lists in one response.
PAGE = 1000


@dataclass(frozen=True, eq=False)
class Leased:
    """A leased batch. token: proves the lease. deliveries: those counted before, plus one."""

    batch: RolloutBatch | ScoredBatch
    id: str
    token: str
    deliveries: int

    @property
    def rollout(self) -> RolloutBatch:
        return self.batch.rollout if isinstance(self.batch, ScoredBatch) else self.batch


# What proves a lease: its id and token.
Held = Leased | UnusableBatch


@dataclass(frozen=True)
class Request(Generic[T]):
    """One request.

    read: parses a successful response; raises ValueError or LookupError if it is not of this API. read_seconds: read
    timeout. repeatable: idempotent, so it may be retried even if it may have been carried out. source: a file that is
    the body, instead of content. sink: gets the bytes of the response, which `read` has not then. most: bytes of the
    longest legal response without a sink.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    content: bytes | None = None
    content_type: str | None = None
    params: Mapping[str, str | int | float | list[str]] = field(default_factory=dict)
    read_seconds: float = _READ_SECONDS
    repeatable: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    source: Path | None = None
    sink: Download | None = None
    most: int = JSON_BYTES


def not_ready_reason() -> Request[None]:
    return Request("GET", "/readyz", lambda _: None, read_seconds=_HEALTH_SECONDS)


def model() -> Request[ModelInfo]:
    return Request("GET", "/v1/model", _as(ModelInfo))


def queue(run: str | None) -> Request[QueueView]:
    return Request("GET", "/v1/queue", _as(QueueView), params={} if run is None else {"run": run})


def glance(run: str | None) -> Request[QueueView]:
    return replace(queue(run), read_seconds=_GLANCE_SECONDS)


def upload(batch: RolloutBatch | bytes) -> Request[Uploaded]:
    def read(response: httpx.Response) -> Uploaded:
        admitted = Admitted.model_validate_json(response.content)
        return Uploaded(id=admitted.id, state=admitted.state, created=response.status_code == httpx.codes.CREATED)

    return Request("POST", "/v1/batches", read, _encoded(batch), wire.CONTENT_TYPE)


def score(batch: RolloutBatch | bytes) -> Request[ScoredBatch]:
    def read(response: httpx.Response) -> ScoredBatch:
        scored = wire.decode(response.content)
        if not isinstance(scored, ScoredBatch):
            raise ValueError("a scored batch was expected")
        return scored

    return Request(
        "POST", "/v1/logprobs", read, _encoded(batch), wire.CONTENT_TYPE, read_seconds=_SCORING_SECONDS,
        most=_BATCH_BYTES,
    )  # fmt: skip


def logprobs(prompt: str, completions: Sequence[str], temperature: float) -> Request[Logprobs]:
    return _logprobs(LogprobsRequest(prompt=prompt, completions=list(completions), temperature=temperature))


def logprobs_of_ids(
    prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], temperature: float
) -> Request[Logprobs]:
    rows: list[TokenIds] = [list(row) for row in completions]
    return _logprobs(LogprobsRequest(prompt_ids=list(prompt_ids), completions=rows, temperature=temperature))


def lease(terms: LeaseBody) -> Request[Leased | None]:
    if terms.count is not None:
        raise ValueError("count: leases of several batches are `lease_many`'s")

    def read(response: httpx.Response) -> Leased | None:
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        headers = response.headers
        held = _held(response.content, headers["Batch-Id"], headers["Lease-Token"], int(headers["Deliveries"]))
        if isinstance(held, UnusableBatch):
            raise held
        return held

    return _lease(terms, read)


def lease_many(terms: LeaseBody) -> Request[list[Held]]:
    def read(response: httpx.Response) -> list[Held]:
        if response.status_code == httpx.codes.NO_CONTENT:
            return []
        return [_held(body, head.id, head.token, head.deliveries) for head, body in bundle.decode(response.content)]

    return _lease(terms.model_copy(update={"count": terms.most}), read)


def ack(leases: Sequence[Leased], checkpoint: str | None) -> list[Request[Outcomes]]:
    return [_settle("ack", AckBody(leases=keys, checkpoint=checkpoint)) for keys in _keys(leases)]


def extend(leases: Sequence[Leased], lease_seconds: float, started: bool) -> list[Request[Outcomes]]:
    return [
        _settle("extend", ExtendBody(leases=keys, lease_seconds=lease_seconds, started=started))
        for keys in _keys(leases)
    ]


def check_train_role() -> Request[Outcomes]:
    """Extends no lease: the server checks the token and does nothing."""
    return _settle("extend", ExtendBody(leases=[]))


def check_reference_role() -> Request[ReferenceVersion]:
    """Names no snapshot: the server checks the token, and then refuses the body with 422."""
    return Request("PUT", "/v1/reference", _as(ReferenceVersion), b"{}", _JSON)


def release(leases: Sequence[Held], error: str | None) -> list[Request[Outcomes]]:
    return [_settle("release", ReleaseBody(leases=keys, error=error)) for keys in _keys(leases)]


def finish_run(run: str, lineage: str) -> Request[Finished]:
    return _post(f"/v1/runs/{quote(run, safe='')}/finish", FinishBody(lineage=lineage or None), _as(Finished))


def report_metrics(
    run: str, records: Sequence[Mapping[str, Any]], lineage: str, after: int | None, read_seconds: float
) -> Request[MetricsKept]:
    """The server checks the records; what JSON does not have raises ValueError here."""
    given = {"lineage": lineage or None, "after": after, "records": records}
    body = {name: value for name, value in given.items() if value is not None}
    content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    return Request("POST", _metrics_path(run), _as(MetricsKept), content, _JSON, read_seconds=read_seconds)


def runs(cursor: str | None) -> Request[RunPage]:
    params = {"limit": PAGE} if cursor is None else {"limit": PAGE, "cursor": cursor}
    return Request("GET", "/v1/runs", _as(RunPage), params=params)


def run_metrics(
    run: str, kind: Kind, names: Sequence[str], lineage: str | None, after: int, limit: int
) -> Request[RunMetrics]:
    params = {"kind": kind, "names": [*names], "after": after, "limit": limit, **_asked_lineage(lineage)}
    return Request("GET", _metrics_path(run), _as(RunMetrics), params=params)


def step_records(run: str, step: int, lineage: str | None) -> Request[list[dict[str, Any]]]:
    def read(response: httpx.Response) -> list[dict[str, Any]]:
        return StepRecords.model_validate_json(response.content).records

    return Request("GET", f"{_metrics_path(run)}/{step}", read, params=_asked_lineage(lineage))


def _metrics_path(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}/metrics"


def _asked_lineage(lineage: str | None) -> dict[str, str]:
    return {} if lineage is None else {"lineage": lineage}


def page(
    state: State | str | None, run: str | None, limit: int, cursor: str | None, order: ListOrder, kept: bool
) -> Request[BatchPage]:
    other_order = None if order is ListOrder.OLDEST else order  # the default is not sent: older servers do not know it
    only_kept = "true" if kept else None
    asked = {"state": state, "run": run, "limit": limit, "cursor": cursor, "order": other_order, "kept": only_kept}
    return Request(
        "GET", "/v1/batches", _as(BatchPage), params={name: value for name, value in asked.items() if value is not None}
    )


def batch(id: str) -> Request[BatchDetails]:
    return Request("GET", _batch_path(id), _as(BatchDetails))


def tokens(id: str) -> Request[TokensView]:
    return Request("GET", f"{_batch_path(id)}/tokens", _as(TokensView), most=_BATCH_BYTES)


def rewards(id: str) -> Request[RewardsView]:
    return Request("GET", f"{_batch_path(id)}/rewards", _as(RewardsView))


def put_training(id: str, told: Training) -> Request[Admitted]:
    return Request(
        "PUT", f"{_batch_path(id)}/training", _as(Admitted), training.encode(told), wire.CONTENT_TYPE,
        read_seconds=_TRAINING_SECONDS,
    )  # fmt: skip


def requeue(id: str) -> Request[Admitted]:
    """Not repeatable: if the batch died again in between, a retry would requeue it a second time."""
    return Request("POST", f"{_batch_path(id)}/requeue", _as(Admitted), repeatable=False)


def drop(id: str) -> Request[None]:
    return Request("DELETE", _batch_path(id), lambda _: None)


def purge(chosen: PurgeBody) -> Request[Purged]:
    return _post("/v1/batches/purge", chosen, _as(Purged))


def replace_reference(snapshot: str | None, version: int) -> Request[ReferenceVersion]:
    asked = ReferenceBody(snapshot=snapshot, version=version)
    return Request(
        "PUT", "/v1/reference", _as(ReferenceVersion), asked.model_dump_json().encode(), _JSON,
        read_seconds=_SCORING_SECONDS,
    )  # fmt: skip


def _lease(terms: LeaseBody, read: Callable[[httpx.Response], T]) -> Request[T]:
    """Adds a request_id if the terms have none, so that a retry does not lease more batches."""
    asked = terms.model_copy(update={"request_id": terms.request_id or uuid4().hex})
    request = _post("/v1/batches/lease", asked, read, read_seconds=terms.wait_seconds + _READ_SECONDS)
    return replace(request, most=_BATCH_BYTES)


def _held(body: bytes, id: str, token: str, deliveries: int) -> Held:
    parsed = wire.parse(body)
    try:
        return Leased(parsed.batch(), id, token, deliveries)
    except BatchError as error:
        return UnusableBatch(id, token, error.field, str(error))


def put_weights(name: WeightsName, path: Path, content: WeightsFile) -> Request[WeightsFile]:
    headers = {"Content-Length": str(content.bytes), "Content-Digest": content_digest(content)}
    return Request(
        "PUT", f"{_weights_path(name)}/{quote(path.name, safe='')}", _as(WeightsFile), content_type=_BYTES,
        read_seconds=_SCORING_SECONDS, headers=headers, source=path,
    )  # fmt: skip


def commit_weights(
    name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]
) -> Request[WeightsVersion]:
    body = CommitBody.model_validate({**words, "files": files})
    return _post(f"{_weights_path(name)}/commit", body, _as(WeightsVersion), read_seconds=_SCORING_SECONDS)


def newest_weights(
    run: str, lineage: str | None, after: tuple[int, int] | None, wait_seconds: float
) -> Request[WeightsVersion | None]:
    def read(response: httpx.Response) -> WeightsVersion | None:
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        return WeightsVersion.model_validate_json(response.content)

    known = None if after is None else f"{after[0]}.{after[1]}"
    asked = {"lineage": lineage, "after": known, "wait_seconds": wait_seconds or None}
    return Request(
        "GET", f"/v1/weights/{quote(run, safe='')}", read, read_seconds=wait_seconds + _READ_SECONDS,
        params={key: value for key, value in asked.items() if value is not None},
    )  # fmt: skip


def weights(name: WeightsName) -> Request[WeightsVersion]:
    return Request("GET", _weights_path(name), _as(WeightsVersion))


def weights_file(name: WeightsName, file: str, sink: Download) -> Request[None]:
    path = f"{_weights_path(name)}/{quote(file, safe='')}"
    return Request("GET", path, sink.begin, sink=sink)


def _weights_path(name: WeightsName) -> str:
    parts = (name.run, name.lineage, str(name.epoch), str(name.version))
    return "/v1/weights/" + "/".join(quote(part, safe="") for part in parts)


def _logprobs(asked: LogprobsRequest) -> Request[Logprobs]:
    return _post("/v1/logprobs", asked, _as(Logprobs), read_seconds=_SCORING_SECONDS)


def _post(
    path: str, body: BaseModel, read: Callable[[httpx.Response], T], *, read_seconds: float = _READ_SECONDS
) -> Request[T]:
    """What is None is not sent: an older server does not know every field."""
    content = body.model_dump_json(exclude_none=True).encode()
    return Request("POST", path, read, content, _JSON, read_seconds=read_seconds)


def _settle(verb: str, body: LeasesBody) -> Request[Outcomes]:
    def read(response: httpx.Response) -> Outcomes:
        results = Results.model_validate_json(response.content).results
        return {result.id: result.outcome for result in results}

    return _post(f"/v1/leases/{verb}", body, read)


def _keys(leases: Sequence[Held]) -> list[list[Key]]:
    """The keys of the leases, in parts of at most _KEYS_AT_ONCE so that each body stays small."""
    keys = [Key(id=lease.id, token=lease.token) for lease in leases]
    return [keys[start : start + _KEYS_AT_ONCE] for start in range(0, len(keys), _KEYS_AT_ONCE)]


def _as(model: type[Model]) -> Callable[[httpx.Response], Model]:
    return lambda response: model.model_validate_json(response.content)


def _encoded(batch: RolloutBatch | bytes) -> bytes:
    return batch if isinstance(batch, bytes) else wire.encode(batch)


def _batch_path(id: str) -> str:
    return f"/v1/batches/{quote(id, safe='')}"
