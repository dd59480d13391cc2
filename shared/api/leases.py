"""Leases: the request for one, what is granted, and the bodies that acknowledge, extend or release several."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from shared.api.base import Lineage, Name, RequestRecord, ResponseRecord, Seconds, Version, example
from shared.api.batches import LEGACY_RUN

# The most batches that one request leases.
MAX_LEASES = 512

# Of a lease: left out of its JSON and of its repr.
_Payload = Annotated[bytes | None, Field(exclude=True, repr=False)]
_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


class Outcome(StrEnum):
    """The result of an ack, extend or release for one lease."""

    OK = "ok"
    ALREADY = "already"  # settled by this same token before: a retry is harmless
    STALE = "stale"  # the token is no longer valid
    UNKNOWN = "unknown"


class Order(StrEnum):
    """Which batch is leased first."""

    FIFO = "fifo"
    FRESHEST = "freshest"


class LeaseBody(RequestRecord):
    model_config = example(consumer="trainer", run="curl", wait_seconds=20, lease_seconds=120)

    consumer: Name
    """Name of the client that leases."""
    incarnation: Name | None = None
    """Identifies one process of the consumer. A new incarnation ends the leases of earlier ones."""
    request_id: Name | None = None
    """A request that repeats it gets the same batch and token, so a lost response strands no batch."""
    run: Name | None = None
    """Only batches of this run. Not `legacy`, the run of the Simple-GRPO protocol."""
    lineage: Lineage | None = None
    """The lineage that leases. It gets only batches of this lineage; those of other lineages of the run expire.
    Absent: the lineage that all clients without one share."""
    epoch: Version | None = None
    policy_version: Version | None = None
    max_lag: Version | None = None
    """Expires batches of the run that are more than this many versions older than policy_version."""
    order: Order = Order.FIFO
    count: int | None = Field(default=None, ge=1, le=MAX_LEASES, strict=True)
    """Leases up to this many batches, in one body. Returns as soon as one is ready. Absent: one."""
    wait_seconds: float = Field(default=20, ge=0, le=300, strict=True)
    lease_seconds: Seconds = 120

    @property
    def most(self) -> int:
        """The most batches that it leases."""
        return self.count or 1

    @property
    def lineage_name(self) -> str:
        """The lineage; empty if the request names none."""
        return self.lineage or ""

    @model_validator(mode="after")
    def _versions_belong_to_a_run(self) -> "LeaseBody":
        if self.run is None and any(given is not None for given in (self.lineage, self.epoch, self.max_lag)):
            raise ValueError("lineage, epoch and max_lag need run: versions are compared within one run")
        if self.max_lag is not None and self.policy_version is None:
            raise ValueError("max_lag needs policy_version, the version that the lag is counted from")
        return self

    @field_validator("run")
    @classmethod
    def _run_has_leases(cls, run: str | None) -> str | None:
        if run == LEGACY_RUN:
            raise ValueError(f"{LEGACY_RUN!r} is the run of the Simple-GRPO protocol: GET /get takes its batches")
        return run


class LeaseKey(RequestRecord):
    """A lease: the `Batch-Id` and `Lease-Token` that came with the batch."""

    id: str = Field(max_length=200)
    token: str = Field(max_length=200)


class Lease(ResponseRecord):
    """The exclusive right to one batch, proved by its token. If an answer has several, its JSON precedes each batch."""

    body: _Payload = None
    """The batch as it was uploaded, which is no part of the JSON. None if it is read or sent apart from the lease."""
    scores: _Payload = None
    """What the server's scoring added to it, likewise (`shared.wire.with_scores`)."""
    id: str
    token: str
    lease_seconds: float = Field(gt=0, strict=True, allow_inf_nan=False)
    deliveries: int = Field(ge=1, strict=True)
    """Those counted before, plus one."""
    bytes: int = Field(ge=0, strict=True)
    """Length of the batch."""


class LeasesBody(RequestRecord):
    leases: Annotated[list[LeaseKey], Field(fail_fast=True)] = Field(max_length=10_000)


class AckBody(LeasesBody):
    model_config = example(leases=[{"id": _ID, "token": "f3…"}], checkpoint="step-40")

    checkpoint: str | None = Field(default=None, max_length=1000)
    """Name of the checkpoint that contains their effect; it is written into their history."""


class ExtendBody(LeasesBody):
    model_config = example(leases=[{"id": _ID, "token": "f3…"}], lease_seconds=120, started=True)

    lease_seconds: Seconds = 120
    started: bool = Field(default=False, strict=True)
    """Training on them begins now: a lease lost later counts as a delivery."""


class ReleaseBody(LeasesBody):
    model_config = example(leases=[{"id": _ID, "token": "f3…"}])

    error: str | None = Field(default=None, max_length=10_000)
    """Why they cannot be used. With an error, the release counts as a delivery."""


class LeaseResult(ResponseRecord):
    id: str
    outcome: Outcome


class LeaseResults(ResponseRecord):
    results: list[LeaseResult]
