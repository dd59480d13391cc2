"""The connection to the reference server, the terms of leases, and counts read from its view of the queue."""

from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from uuid import uuid4

from policy_trainer.config import INLINE, RunConfig
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token
from shared.api import LeaseBody, Order, QueueView, State
from shared.batch import RolloutBatch
from shared.client import Leased, RefServerClient
from shared.client.connection import OnWait
from shared.client.credentials import choose_token
from shared.errors import UserError

# Of ref-server serve.
_DEFAULT_PORT = 8400


def connect(config: RunConfig, url: str, on_wait: OnWait, patience: float | None = None) -> RefServerClient:
    """A client that waits for the server until on_wait raises, or for `patience` seconds; 0 tries once.

    Raises UserError for an unusable token or CA.
    """
    try:
        hint = "" if config.server == INLINE else f"; {_remedy(config)}"
        token = token_of(config)
        return RefServerClient(url, token=token, ca=config.tls_ca, patience=patience, on_wait=on_wait, hint=hint)
    except ValueError as error:
        raise UserError(f"tls_ca: {error}") from None


def token_of(config: RunConfig) -> str | None:
    """The token for the server: the configured one, else that of a server which the trainer started; None without one.

    Raises UserError for an unusable file.
    """
    token = configured_token(config)
    return read_token(RunDirectory(config.run_dir)) if token is None and config.server == INLINE else token


def configured_token(config: RunConfig) -> str | None:
    """The token that the user gave; None without one. Raises UserError for an unusable file."""
    try:
        return choose_token(config.token, config.token_file)
    except ValueError as error:
        raise UserError(str(error) if config.token else f"token_file: {error}") from None


def _remedy(config: RunConfig) -> str:
    port = urlsplit(config.server).port
    options = f" --port {port}" if port not in (None, _DEFAULT_PORT) else ""
    return f"start one with: ref-server serve --model {config.model}{options}, or leave --server out"


@dataclass(frozen=True)
class LeaseTerms:
    """Which batches a consumer wants, and whether one that came is such: the same for all leases of one process."""

    consumer: str
    run: str
    epoch: int
    max_lag: int | None
    lease_seconds: float
    order: Order = Order.FIFO
    lineage: str = ""
    incarnation: str = field(default_factory=lambda: uuid4().hex)

    def at(self, policy_version: int, *, wait_seconds: float, count: int | None = None) -> LeaseBody:
        """The body of a lease request for one batch or up to `count`, for a policy of that version."""
        return LeaseBody(
            consumer=self.consumer,
            incarnation=self.incarnation,
            run=self.run,
            lineage=self.lineage or None,
            epoch=self.epoch,
            policy_version=policy_version,
            max_lag=self.max_lag,
            order=self.order,
            count=count,
            wait_seconds=wait_seconds,
            lease_seconds=self.lease_seconds,
        )

    def check_ours(self, leased: Leased) -> None:
        """Raises RunFailed for a batch of another run: a fault of the server that would affect every batch."""
        batch = leased.rollout
        if (batch.run, batch.lineage) != (self.run, self.lineage):
            raise RunFailed(
                f"batch {leased.id} is of run {batch.run!r}, lineage {batch.lineage!r}; this trainer leases run "
                f"{self.run!r}, lineage {self.lineage!r}.\n"
                "The reference server mixes runs: use one of this version, with a --data-dir of its own"
            )

    def foreign(self, batch: RolloutBatch, version: int) -> str | None:
        """Why weights of this run cannot have sampled the batch; None if they can. version: the run's steps so far."""
        if batch.policy_version <= version:
            return None
        return (
            f"it has policy_version {batch.policy_version}, but this run has made {version} steps: its sampler names "
            "versions that do not exist. policy_version must be the `version` of weights/latest.json"
        )

    def too_old(self, batch: RolloutBatch, version: int) -> bool:
        """Whether a batch is more than max_lag versions behind a policy of that version."""
        return self.max_lag is not None and version - batch.policy_version > self.max_lag


def batches_by_state(queue: QueueView, run: str) -> Counter[State]:
    """Numbers of a run's batches by state; 0 for states without any."""
    return Counter({state: depth.batches for state, depth in queue.runs.get(run, {}).items()})


def in_flight_allowance(queue: QueueView) -> int:
    """The most batches that one run may have leased and not yet acked while no other run leases any."""
    return min(queue.limits.max_in_flight, queue.limits.max_in_flight_per_run)


def leases_are_full(queue: QueueView, run: str) -> bool:
    """Whether the server leases nothing more to a run until it acks or releases a batch.

    A run may have at most as many in flight as are free.
    """
    leased, of_run = queue.states[State.LEASED].batches, batches_by_state(queue, run)[State.LEASED]
    free = queue.limits.max_in_flight - leased
    return of_run + 1 > free - 1 or of_run >= queue.limits.max_in_flight_per_run


def store_fills_up(queue: QueueView, run: str) -> bool:
    """Whether the run's payloads use more than half of what it may store: acks make room for further uploads.

    A run may store at most as much as is free; payloads of settled batches make room by themselves.
    """
    in_use = (State.QUEUED, State.SCORING, State.READY, State.LEASED)
    free = queue.limits.max_stored_bytes - sum(queue.states[state].bytes for state in in_use)
    of_run = queue.runs.get(run, {})
    return 2 * sum(of_run[state].bytes for state in in_use if state in of_run) > free
