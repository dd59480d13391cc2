"""Iterative GRPO: the policy becomes the reference every so many steps (DeepSeekMath, arXiv 2402.03300, algorithm 1).

A renewal writes a snapshot, brings it to a server that shares no directory, makes the server score with it, and then
records it in the run's state. A run killed in between resumes with the reference that its checkpoint names, and renews
it again when the state says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from policy_trainer.config import ReferenceConfig, WeightsPlace
from policy_trainer.learner.average import Average, average_of, averaged_state, move_average
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.lifecycle.endings import RunFailed, write_failures
from policy_trainer.reference.remote_reference import ServedReference, choose_place
from policy_trainer.reference.snapshots import Snapshots
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_average
from shared.batch import RolloutBatch, ScoredBatch
from shared.client import Leased, RefServerClient, RefServerError
from shared.client.connection import OnWait
from shared.errors import UserError


class Renewal(Protocol):
    average: Average | None
    """The float32 average that the reference was rounded from, for checkpoints; None if it is a copy of the policy."""

    def ensure(self) -> None:
        """Renews the reference if that is due, else restores it if the server has another.

        Call it before anything is sampled, and before each step. Raises UserError, RunFailed.
        """
        ...

    def rescored(self, leased: Sequence[Leased]) -> Sequence[Leased]:
        """The same leases, with log-probs of the reference that is due at this step."""
        ...


class FixedReference:
    """The reference stays the model that the server began with."""

    average: Average | None = None

    def ensure(self) -> None:
        pass

    def rescored(self, leased: Sequence[Leased]) -> Sequence[Leased]:
        return leased


class RenewedReference:
    """The reference is a snapshot of the policy or of its moving average, taken when the run begins and then every
    sync_steps steps.

    A server that lost it gets it again. If another run replaces it, this run fails: neither run would know which
    reference its batches were scored with. average: as of the last renewal.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        state: TrainState,
        learner: PolicyLearner,
        tokenizer: PreTrainedTokenizerBase,
        *,
        snapshots: Snapshots,
        served: ServedReference,
        checkpoints: Checkpoints,
        average: Average | None,
        note: Callable[[str], None],
    ) -> None:
        self.average = average
        self._config = config
        self._state = state
        self._learner = learner
        self._tokenizer = tokenizer
        self._snapshots = snapshots
        self._served = served
        self._checkpoints = checkpoints
        self._note = note
        self._confirmed = False

    def ensure(self) -> None:
        state, every = self._state, self._config.sync_steps
        # Only the state decides: a renewal that no checkpoint includes is repeated.
        if state.reference is None or 0 < every <= state.step - state.renewed_at:
            self._renew()
        else:
            self._keep(state.reference)
        self._confirmed = True

    def rescored(self, leased: Sequence[Leased]) -> Sequence[Leased]:
        """Scores batches again that an earlier reference scored: they waited in the queue during a renewal."""
        return [lease if self._is_current(lease) else replace(lease, batch=self._score(lease)) for lease in leased]

    def _is_current(self, lease: Leased) -> bool:
        batch = lease.batch
        return isinstance(batch, ScoredBatch) and batch.reference_version == str(self._state.reference_version)

    def _score(self, lease: Leased) -> RolloutBatch | ScoredBatch:
        try:
            return self._served.score(lease.rollout)
        except RefServerError as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            self._note(f"batch {lease.id} keeps the log-probs of an earlier reference: {error}")
            return lease.batch

    def _renew(self) -> None:
        state, average = self._state, self._next_average()
        self._write_and_serve(average)
        state.renewed_at, self.average = state.step, average
        what = "the policy" if average is None else "a moving average of the policy"
        self._note(
            f"the reference is {what} at step {state.step}: {state.reference}, version {state.reference_version}"
        )
        self._remove_old()

    def _next_average(self) -> Average | None:
        if not self._config.decay:
            return None
        weights = self._learner.parameters()
        return weights if self.average is None else move_average(self.average, weights, self._config.decay)

    def _keep(self, reference: str) -> None:
        """Puts the run's reference back if the server scores with another one."""
        state, served = self._state, self._served.look()
        if self._served.is_served(served, reference) and served.reference_version == state.reference_version:
            return
        if self._confirmed and served.snapshot is not None:
            raise RunFailed(
                f"another client has replaced the server's reference by {served.snapshot}, version "
                f"{served.reference_version}: a run that renews it needs its own server. --resume restores it"
            )
        if self.average is not None and not self._snapshots.holds(reference):
            self._write_and_serve(self.average)
        else:
            self._snapshots.find(reference)
            self._serve(reference, state.reference_version)
        self._note(f"the reference is {state.reference} again, version {state.reference_version}")

    def _write_and_serve(self, average: Average | None) -> None:
        state = self._state
        known = (self._served.newest_version(), state.reference_version, self._snapshots.newest_version)
        version = max(known) + 1
        with write_failures(f"the reference of step {state.step}"):
            weights = self._learner.state() if average is None else averaged_state(self._learner.state(), average)
            model, tokenizer = self._learner.model, self._tokenizer
            name = self._snapshots.write(model, tokenizer, weights, epoch=state.epoch, version=version)
        self._serve(name, version)

    def _serve(self, snapshot: str, version: int) -> None:
        served = self._served.replace(snapshot, version)
        self._state.reference, self._state.reference_version = snapshot, served

    def _remove_old(self) -> None:
        """Removes snapshots that neither the server nor a checkpoint needs. A failure is only reported."""
        try:
            self._snapshots.remove_all_but({self._state.reference, *self._checkpoints.references()})
        except OSError as error:
            self._note(f"old snapshots are not removed: {error}")


def choose_renewal(
    config: ReferenceConfig,
    run: str,
    state: TrainState,
    learner: PolicyLearner,
    tokenizer: PreTrainedTokenizerBase,
    client: RefServerClient,
    checkpoints: Checkpoints,
    *,
    lineage: str,
    weights: WeightsPlace,
    on_wait: OnWait,
    note: Callable[[str], None],
) -> Renewal:
    """Chooses by the settings and the checkpoint's reference. weights: where trainer and server meet.

    Raises UserError if that reference cannot be found, or if the token may not replace the server's.
    """
    if not config.sync_steps and state.reference is None:
        return FixedReference()
    if config.snapshot_root is None:
        raise UserError(
            f"reference.snapshot_root: the checkpoint was trained with the reference {state.reference}; give the "
            "directory that it is in, ref-server's --snapshot-root"
        )
    snapshots = Snapshots(config.snapshot_root, run)
    place = choose_place(weights, config.snapshot_root, client, run, lineage)
    served = ServedReference(client, place, on_wait)
    served.check_role()  # a resumed run would not notice until its next renewal
    return RenewedReference(
        config,
        state,
        learner,
        tokenizer,
        snapshots=snapshots,
        served=served,
        checkpoints=checkpoints,
        average=_average(config, state, checkpoints.newest(), snapshots),
        note=note,
    )


def _average(
    config: ReferenceConfig, state: TrainState, checkpoint: Path | None, snapshots: Snapshots
) -> Average | None:
    """The checkpoint's average. If reference.decay is new in a resumed run, the average starts at the reference."""
    if checkpoint is None or state.reference is None:
        return None
    average = read_average(checkpoint, state.renewed_at)
    return average_of(snapshots.find(state.reference)) if average is None and config.decay else average
