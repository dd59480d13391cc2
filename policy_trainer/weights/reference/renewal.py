"""Iterative GRPO: the policy becomes the reference every so many steps (DeepSeekMath, arXiv 2402.03300, algorithm 1).

A renewal writes a snapshot, brings it to a server that shares no directory, makes the server score with it, and then
records it in the run's state. A run killed in between resumes with the reference that its checkpoint names, and renews
it again when it is due.

With reference.decay the reference is a moving average of the policy's weights. It is float32 on the CPU, whatever the
model's dtype: bfloat16 would round away most updates of a slow average.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import ENV_PREFIX, ReferenceConfig, TrainConfig
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.processes.lifecycle.endings import RunFailed, write_failures
from policy_trainer.run_files.checkpoint import Average, RunFiles, read_average
from policy_trainer.weights.reference.snapshots import Snapshots, UploadedSnapshots
from shared.api import ModelInfo
from shared.batch import Batch
from shared.client import Leased, RefServerClient, RefServerError
from shared.client.credentials import remedy
from shared.client.retry import OnWait, retried
from shared.errors import UserError
from shared.models import load_model
from shared.spelling import spell_setting

# Codes of errors to retry after: another client replaces the reference, or has just replaced it; or the server has lost
# files since they were uploaded.
_RETRIED = ("busy", "older_version", "not_whole")
_BUSY_SECONDS = 0.5


class Renewal:
    """The reference is a snapshot of the policy or of its moving average, taken when the run begins and then every
    sync_steps steps.

    A server that lost it gets it again. If another run replaces it, this run fails: neither run would know which
    reference its batches were scored with.
    average: the float32 average that the reference was rounded from at the last renewal, for checkpoints; None if the
    reference is a copy of the policy.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        files: RunFiles,
        learner: PolicyLearner,
        snapshots: Snapshots,
        client: RefServerClient,
        on_wait: OnWait,
        note: Callable[[str], None],
    ) -> None:
        """on_wait: called while waiting for the server; it may raise to stop."""
        self.average = _average(config, files, snapshots)
        self._config = config
        self._state = files.state
        self._checkpoints = files.checkpoints
        self._learner = learner
        self._snapshots = snapshots
        self._client = client
        self._on_wait = on_wait
        self._note = note
        self._confirmed = False

    def ensure(self) -> None:
        """Renews the reference if that is due, else restores it if the server has another.

        Call it before anything is sampled, and before each step. Raises UserError, RunFailed.
        """
        state, every = self._state, self._config.sync_steps
        # Only the state decides: a renewal that no checkpoint includes is repeated.
        if state.reference is None or 0 < every <= state.step - state.renewed_at:
            self._renew()
        else:
            self._keep(state.reference)
        self._confirmed = True

    def rescored(self, leased: Sequence[Leased]) -> Sequence[Leased]:
        """The same leases, with log-probs of the current reference.

        Batches that waited in the queue during a renewal were scored by an earlier reference; they are scored again.
        """
        return [replace(lease, batch=self._scored(lease)) for lease in leased]

    def _scored(self, lease: Leased) -> Batch:
        batch = lease.batch
        if batch.reference_version == str(self._state.reference_version):
            return batch
        try:
            return self._client.score(batch.without_scores())
        except RefServerError as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            self._note(f"batch {lease.id} keeps the log-probs of an earlier reference: {error}")
            return batch

    def _renew(self) -> None:
        state, average = self._state, None
        if self._config.decay:
            average = self._learner.parameters()
            if self.average is not None:
                average = _move_average(self.average, average, self._config.decay)
        self._write_and_serve(average)
        state.renewed_at, self.average = state.step, average
        what = "the policy" if average is None else "a moving average of the policy"
        self._note(
            f"the reference is {what} at step {state.step}: {state.reference}, version {state.reference_version}"
        )
        try:
            self._snapshots.remove_all_but({state.reference, *self._checkpoints.references()})
        except OSError as error:
            self._note(f"old snapshots are not removed: {error}")

    def _keep(self, reference: str) -> None:
        """Restores the run's reference if the server scores with another."""
        state, served = self._state, self._client.model()
        name = self._snapshots.name_on_server(reference)
        if (served.snapshot, served.reference_version) == (name, state.reference_version):
            return
        if self._confirmed and served.snapshot is not None:
            raise RunFailed(
                f"another client has replaced the server's reference by {served.snapshot}, version "
                f"{served.reference_version}: a run that renews it needs its own server",
                f"{spell_setting('resume', True)} restores it",
            )
        if self.average is not None and not self._snapshots.holds(reference):
            self._write_and_serve(self.average)
        else:
            self._snapshots.find(reference)
            self._serve(reference, state.reference_version)
        self._note(f"the reference is {state.reference} again, version {state.reference_version}")

    def _write_and_serve(self, average: Average | None) -> None:
        state = self._state
        known = (_newest_version(self._client.model()), state.reference_version, self._snapshots.newest_version)
        version = max(known) + 1
        with write_failures(f"the reference of step {state.step}"):
            weights = self._learner.state() if average is None else _averaged_state(self._learner.state(), average)
            name = self._snapshots.write(self._learner.model, weights, epoch=state.epoch, version=version)
        self._serve(name, version)

    def _serve(self, snapshot: str, version: int) -> None:
        """Makes the server score with a snapshot, of this version or a higher one. A repeated call changes nothing.

        Raises UserError when the server refuses.
        """
        name = self._snapshots.name_on_server(snapshot)

        def serve() -> int | None:
            served = self._client.model()
            if served.snapshot == name:
                return served.reference_version
            try:
                self._snapshots.bring(snapshot)
                newer = max(version, _newest_version(served) + 1)
                return self._client.replace_reference(name, newer).reference_version
            except RefServerError as error:
                if error.code in _RETRIED:
                    raise
                raise self._snapshots.refusal(snapshot, error) from error

        newest = retried(serve, _reason_to_wait, self._on_wait, longest=_BUSY_SECONDS)
        self._state.reference, self._state.reference_version = snapshot, newest or 0


def _reason_to_wait(error: Exception) -> str | None:
    waits = isinstance(error, RefServerError) and error.code in _RETRIED
    return "the reference server to finish another replacement" if waits else None


def choose_renewal(
    config: TrainConfig,
    files: RunFiles,
    learner: PolicyLearner,
    tokenizer: PreTrainedTokenizerBase,
    client: RefServerClient,
    on_wait: OnWait,
    note: Callable[[str], None],
) -> Renewal | None:
    """By the settings and the checkpoint's reference; None if the reference stays the model that the server began with.

    Raises UserError if that reference cannot be found, or if the token may not replace the server's.
    """
    reference, root = files.state.reference, config.reference.snapshot_root
    if not config.reference.sync_steps and reference is None:
        return None
    if root is None:
        raise UserError(
            f"reference.snapshot_root: the checkpoint was trained with the reference {reference}",
            "give the directory that it is in, ref-server's `--snapshot-root`",
        )
    try:
        client.check_reference_role()  # a resumed run would not notice until its next renewal
    except RefServerError as error:
        raise UserError(f"reference.sync_steps: {error}", remedy(error, ENV_PREFIX)) from error
    snapshots = Snapshots(root, config.run, tokenizer)
    if config.weights == "server":
        snapshots = UploadedSnapshots(root, config.run, tokenizer, client, files.lineage)
    return Renewal(config.reference, files, learner, snapshots, client, on_wait, note)


def _average(config: ReferenceConfig, files: RunFiles, snapshots: Snapshots) -> Average | None:
    """The checkpoint's average. If reference.decay is new in a resumed run, the average starts at the reference."""
    state, checkpoint = files.state, files.checkpoints.newest()
    if checkpoint is None or state.reference is None:
        return None
    average = read_average(checkpoint, state.renewed_at)
    if average is not None or not config.decay:
        return average
    directory = str(snapshots.find(state.reference).resolve())
    model = load_model(directory, revision=None, device="cpu", dtype="float32")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _newest_version(served: ModelInfo) -> int:
    """A server that has lost the weights that its queue needs scores with others, and accepts none of that version."""
    return max(served.reference_version or 0, served.wanted_version or 0)


def _move_average(average: Average, weights: Average, decay: float) -> Average:
    """decay * average + (1 - decay) * policy, in new tensors; exactly the policy where both are equal."""
    return {name: average[name].lerp(weight, 1 - decay) for name, weight in weights.items()}


def _averaged_state(state: Mapping[str, Tensor], average: Average) -> dict[str, Tensor]:
    """A model's state dict with the average for its parameters, in their dtype. Tied weights stay one tensor."""
    replaced = {id(state[name]): values.to(state[name].dtype) for name, values in average.items()}
    return {name: replaced.get(id(tensor), tensor) for name, tensor in state.items()}
