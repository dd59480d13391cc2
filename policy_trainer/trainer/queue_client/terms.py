"""Which batches a run leases, which of them it can train on, and what a refusal of a lease means."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self
from uuid import uuid4

from transformers import PreTrainedModel

from policy_trainer.config import LossConfig, ReferenceSource, TrainConfig
from policy_trainer.learner.groups import PartWeights, missing_input
from policy_trainer.processes.lifecycle.endings import RunFailed
from shared.api import LeaseBody, Order
from shared.batch import Batch, BatchError
from shared.client import Leased, RefServerError
from shared.logprobs import Vision, vision_of
from shared.models import context_length, embedding_rows
from shared.spelling import spell_setting

# In seconds: another trainer lives if its presence now ends later than before by more than this. The server rounds up
# to whole seconds, and its answers take a moment.
_SLACK_SECONDS = 1.5
_ASK_SECONDS = 1.0


class LeaseRefusals:
    """Judges the refusals of a run's lease requests.

    A trainer that was killed is present on the server for a while. It is given up once that time is over. If the time
    is prolonged instead, another trainer lives.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._free_at: float | None = None
        self._admitted = False
        self.reason: str | None = None
        """What this trainer waits for; None before a refusal."""

    def admitted(self) -> None:
        """The server has answered a lease request."""
        self._admitted = True

    def refused(self, error: RefServerError) -> float:
        """Seconds after which to ask again. Raises RunFailed if another trainer lives; other errors as they are."""
        if error.code == "superseded":
            raise RunFailed(
                f"run: another trainer of run {self._run!r} has taken over, from a copy of this run's directory",
                f"stop one of them, or give one another name with {spell_setting('run')}",
            ) from error
        if error.code != "run_taken":
            raise error
        seconds = error.retry_after or _ASK_SECONDS
        free_at = self._clock() + seconds
        if self._admitted or (self._free_at is not None and free_at > self._free_at + _SLACK_SECONDS):
            raise RunFailed(
                f"run: another trainer trains a run named {self._run!r} on this "
                f"server{', and has taken it from this one' if self._admitted else ''}",
                f"stop that one, or choose another name with {spell_setting('run')}, or another "
                f"{spell_setting('run_dir')}",
            ) from error
        if self.reason is None:
            self.reason = (
                f"run {self._run!r} was trained by another trainer a moment ago: waiting up to {seconds:.0f} s to see "
                "whether it lives"
            )
        self._free_at = free_at if self._free_at is None else min(free_at, self._free_at)
        return min(seconds, _ASK_SECONDS)


@dataclass(frozen=True)
class LeaseTerms:
    """Which batches a consumer wants: the same for all leases of one process."""

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
        batch = leased.batch
        if (batch.run, batch.lineage) != (self.run, self.lineage):
            raise RunFailed(
                f"the reference server mixes runs: batch {leased.id} is of run {batch.run!r}, lineage "
                f"{batch.lineage!r}, and this trainer leases run {self.run!r}, lineage {self.lineage!r}",
                "use a server of this version, with a separate `--data-dir`",
            )

    def foreign(self, batch: Batch, version: int) -> str | None:
        """Why weights of this run cannot have sampled the batch; None if they can. version: the run's steps so far."""
        if batch.policy_version <= version:
            return None
        return (
            f"it has policy_version {batch.policy_version}, but this run has made {version} steps: its sampler names "
            "versions that do not exist. policy_version must be the `version` of weights/latest.json"
        )

    def too_old(self, batch: Batch, version: int) -> bool:
        """Whether a batch is more than max_lag versions behind a policy of that version."""
        return self.max_lag is not None and version - batch.policy_version > self.max_lag


@dataclass(frozen=True)
class BatchCheck:
    """Decides which batches the policy can be trained on.

    vocabulary: rows of the policy's embedding. context: most tokens of a row; None where the model has no bound.
    reference: the source of its log-probs. weights: of the rewards, by name. vision: how the policy takes images; None
    if it takes none. teacher_prompts: whether the run's teacher reads other prompts than the policy.

    A server with a model has checked ids, lengths and images. A server without one cannot check them.
    """

    loss: LossConfig
    vocabulary: int
    context: int | None
    reference: ReferenceSource = "server"
    weights: PartWeights = field(default_factory=dict)
    vision: Vision | None = None
    teacher_prompts: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, config: TrainConfig, weights: PartWeights) -> Self:
        source, vision = config.reference.source, vision_of(model)
        shown = config.data.teacher_prompt_template is not None
        return cls(config.loss, embedding_rows(model), context_length(model), source, weights, vision, shown)

    def refusal(self, batch: Batch) -> str | None:
        """Why the batch cannot be trained on; None if it can."""
        group = batch.group
        try:
            group.check_ids(self.vocabulary, "the policy's vocabulary")
            if self.vision is not None:
                self.vision.check(group)
            elif group.images:
                raise BatchError("image", "must be absent: the policy takes no images")
        except BatchError as error:
            return str(error)
        if self.context is not None and group.longest_row > self.context:
            return f"it has a row of {group.longest_row} tokens; the policy's context is {self.context}"
        if self.teacher_prompts and group.teacher_prompt_ids is None:
            return (
                "it has no teacher_prompt_ids, which data.teacher_prompt_template needs: its worker lacks that setting"
            )
        return missing_input(batch, self.loss, self.reference, self.weights)
