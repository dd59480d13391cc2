"""The connection to the reference server, the state of its queue, and the samples that it keeps."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import numpy as np

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import INLINE, RunConfig
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token
from shared.api import ListOrder, QueueView, State
from shared.batch import Array, Batch, BatchError, Training
from shared.client import ClientError, RefServerClient
from shared.client.credentials import choose_token
from shared.client.retry import OnWait
from shared.errors import UserError
from shared.spelling import spell_setting

# Of ref-server serve.
_DEFAULT_PORT = 8400

# The least time between two requests.
_EVERY_SECONDS = 1.0
# After a request without an answer: each of them blocks the training loop until it times out.
_UNANSWERED_SECONDS = 15.0
_STATES = (State.QUEUED, State.SCORING, State.READY, State.EXPIRED, State.DEAD)
_LOST = (State.DEAD, State.EXPIRED)


def connect(config: RunConfig, url: str, on_wait: OnWait | None, patience: float | None = None) -> RefServerClient:
    """A client that waits for the server until on_wait raises, or for `patience` seconds; 0 tries once.

    Raises UserError for an unusable token or CA.
    """
    try:
        hint = "" if config.server == INLINE else f"; {without_server(config)}"
        token = token_of(config)
        return RefServerClient(url, token=token, ca=config.tls_ca, patience=patience, on_wait=on_wait, hint=hint)
    except ValueError as error:
        raise UserError(f"tls_ca: {error}") from None


def token_of(config: RunConfig) -> str | None:
    """The configured token, else that of the server that the trainer started; None if there is neither.

    Raises UserError for an unusable file.
    """
    token = configured_token(config)
    return read_token(RunDirectory(config.run_dir)) if token is None and config.server == INLINE else token


def configured_token(config: RunConfig) -> str | None:
    """The token that the user gave, if any. Raises UserError for an unusable file."""
    try:
        return choose_token(config.token, config.token_file)
    except ValueError as error:
        raise UserError(str(error) if config.token else f"token_file: {error}") from None


def without_server(config: RunConfig) -> str:
    """What to do where no server answers at the URL that the user gave."""
    port = urlsplit(config.server).port
    options = f" --port {port}" if port not in (None, _DEFAULT_PORT) else ""
    command = f"`ref-server serve --model {config.model}{options}`"
    return f"start one with: {command}, or leave {spell_setting('server')} out"


def batches_by_state(queue: QueueView, run: str) -> Counter[State]:
    """Numbers of a run's batches by state; 0 for states without any."""
    return Counter({state: depth.batches for state, depth in queue.runs.get(run, {}).items()})


def in_flight_allowance(queue: QueueView) -> int:
    """The most batches that one run may have leased and not yet acked while no other run leases any."""
    return min(queue.limits.max_in_flight, queue.limits.max_in_flight_per_run)


def leases_are_full(queue: QueueView, run: str) -> bool:
    """Whether the server leases nothing more to a run until it acks or releases a batch.

    A run may have at most as many in flight as are free, and all runs of one token three quarters. The server does not
    say whose runs the others are, so they count as this token's: at worst a trainer settles early.
    """
    leased, of_run = queue.states[State.LEASED].batches, batches_by_state(queue, run)[State.LEASED]
    free = queue.limits.max_in_flight - leased
    full = of_run + 1 > free - 1 or leased + 1 + of_run + 1 > 3 * (free - 1)
    return full or of_run >= queue.limits.max_in_flight_per_run


def store_fills_up(queue: QueueView, run: str) -> bool:
    """Whether the run's payloads use more than half of what it may store: acks make room for further uploads.

    A run may store at most as much as is free, and all runs of one token three quarters (see `leases_are_full`);
    payloads of settled batches make room by themselves.
    """
    in_use = (State.QUEUED, State.SCORING, State.READY, State.LEASED)
    of_all = sum(queue.states[state].bytes for state in in_use)
    of_run = sum(depth.bytes for state, depth in queue.runs.get(run, {}).items() if state in in_use)
    free = queue.limits.max_stored_bytes - of_all
    return 2 * of_run > free or 2 * (of_all + of_run) > 3 * free


class QueueWatch:
    """The state of the queue, as of the server's last answer.

    depth: batches of one run by state. scoring_seconds: the server's working time since it started, for all runs. Both
    are None before the first answer.
    external: whether other programs sample, which may still do so for an epoch that has ended.
    """

    def __init__(self, client: RefServerClient, run: str, *, external: bool = False) -> None:
        self._client = client
        self._run = run
        self._external = external
        # The reason as of this number of expired batches.
        self._abandoned: tuple[int, str | None] = (0, None)
        self._not_before = 0.0
        self.depth: dict[str, int | None] = dict.fromkeys(_STATES)
        self._at_first: dict[State, int] = {}
        self.scoring_seconds: float | None = None
        self.leases_full = False
        self.store_fills_up = False

    def look(self) -> None:
        """Reads the queue, at most every _EVERY_SECONDS. It does not retry: without an answer the last counts stay."""
        if time.monotonic() < self._not_before:
            return
        queue = self._client.glance(self._run)
        if queue is not None:
            states = batches_by_state(queue, self._run)
            self.depth = {state: states[state] for state in _STATES}
            self._at_first = self._at_first or {state: states[state] for state in _LOST}
            self.scoring_seconds = queue.scoring.working_seconds
            self.leases_full = leases_are_full(queue, self._run)
            self.store_fills_up = store_fills_up(queue, self._run)
        pause = _UNANSWERED_SECONDS if queue is None else _EVERY_SECONDS
        self._not_before = time.monotonic() + pause

    def wait_reason(self, workers: str) -> str:
        """Why a trainer has no batches, as a sentence. workers: the reason when the server has nothing to do."""
        to_score = (self.depth[State.QUEUED] or 0) + (self.depth[State.SCORING] or 0)
        if self.leases_full:
            reason = "the reference server leases no more batches until some are acked: its limit is reached"
        elif to_score:
            reason = f"the reference server scores {to_score} batches"
        else:
            reason = self._why_abandoned() or workers
        lost = {state: count for state in self._at_first if (count := self._lost(state)) > 0}
        return reason + "".join(f"; batches {state} since the start: {n}" for state, n in lost.items())

    def _lost(self, state: State) -> int:
        """Batches that reached this state since the start: an earlier run of the same name may have left others."""
        return (self.depth[state] or 0) - self._at_first.get(state, 0)

    def _why_abandoned(self) -> str | None:
        """Why batches arrive but expire as abandoned; None if none do."""
        expired = self._lost(State.EXPIRED) if self._external else 0
        if expired != self._abandoned[0]:
            page = self._client.page(State.EXPIRED, self._run, limit=1, order=ListOrder.NEWEST)
            batch = page.batches[0] if page.batches else None
            reason = None
            if batch is not None and batch.reason == "abandoned":
                reason = (
                    f"batches arrive but are abandoned: the newest has epoch {batch.epoch}, policy_version "
                    f"{batch.policy_version}, lineage {batch.lineage!r}, which this run no longer accepts. Samplers "
                    "must take lineage, epoch and policy_version from the newest published weights (docs/client.md)"
                )
            self._abandoned = expired, reason
        return self._abandoned[1]


class KeptSamples:
    """Reports training data of the sampled groups to the server, which keeps these batches for display.

    client: tries once. note: called with the first failure; no failure stops the run.
    """

    def __init__(self, client: RefServerClient, learner: PolicyLearner, note: Callable[[str], None]) -> None:
        self._client = client
        self._learner = learner
        self._note = note
        self._noted = False

    def keep(self, step: int, sampled: Sequence[tuple[Batch, Group]]) -> None:
        """Sends the sampled groups of a step, at least one, each with its batch. Call it before they are acked.

        step: training steps done.
        """
        logps = self._learner.logps([batch for batch, _ in sampled])
        try:
            for (batch, group), values in zip(sampled, logps, strict=True):
                self._client.put_training(batch.id, Training(step, trained_advantages(group), values))
        except (ClientError, BatchError) as error:
            if not self._noted:
                self._note(f"the server keeps no samples of step {step}: {error}")
            self._noted = True


def trained_advantages(group: Group) -> Array:
    """float32 (C,): the advantage of each token that trained, 0 for the others."""
    if not len(group.advantages):
        return np.zeros(len(group.mask), np.float32)
    return np.where(group.mask, group.advantages, 0).astype(np.float32)
