"""The rollout worker: it loads the published weights, samples, judges and uploads, and waits when the queue is full."""

import json
import time
from contextlib import closing
from dataclasses import asdict

import structlog
from uuid6 import uuid7

from policy_trainer.config import RolloutConfig
from policy_trainer.data.completion import group_tokens, loss_mask
from policy_trainer.processes.lifecycle.timing import logged_wait
from policy_trainer.reporting import conversations, logged
from policy_trainer.reporting.reward_failures import reported
from policy_trainer.rollout.delivery import Delivery
from policy_trainer.rollout.outbox import Outbox, hold, worker_directory
from policy_trainer.rollout.rounds import JudgedGroup, Rounds
from policy_trainer.rollout.sampling.sampler import Sampler, WeightsLost
from policy_trainer.rollout.share import StepShare
from policy_trainer.trainer.queue_client.server import batches_by_state
from policy_trainer.weights.published.publication import Publication, PublishedWeights
from shared import wire
from shared.api import State
from shared.batch import Batch, BatchError
from shared.client import RefServerClient
from shared.client.retry import OnWait
from shared.errors import UserError

log = structlog.get_logger()

# Pauses between looks for published weights, and between looks at the server's queue.
_WEIGHTS_SECONDS = 0.2
_ROOM_SECONDS = 0.1
# The same while a step's groups are sampled and the trainer waits for nothing else.
_STEP_SECONDS = 0.02
# After so long a wait for the next step, and twice as long each time, a server is asked whether it has lost groups.
_LOST_SECONDS = 5.0
# How long the deletion of a run's directory may take.
_DELETING_SECONDS = 5.0


class RunFinished(Exception):
    """The trainer has finished the run."""


class LineageChanged(Exception):
    """The run's directory holds a new lineage: it was deleted, and the run was started again."""


def until_finished(weights: PublishedWeights, *, recurring: bool = False) -> OnWait:
    """Called while the worker waits: logs waits as `logged_wait`, and raises RunFinished once the run is finished."""
    log_wait = logged_wait(recurring=recurring)

    def wait(reason: str, seconds: float) -> None:
        publication = weights.newest()
        if publication and publication.finished:
            raise RunFinished
        log_wait(reason, seconds)

    return wait


class RolloutWorker:
    """One worker. vocabulary: rows of the model's embedding. rounds: what it samples, with the same sampler."""

    def __init__(
        self,
        config: RolloutConfig,
        sampler: Sampler,
        vocabulary: int,
        rounds: Rounds,
        client: RefServerClient,
        weights: PublishedWeights,
        wait: OnWait,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._rounds = rounds
        self._client = client
        self._wait = wait
        self._weights = weights
        self._loaded: Publication | None = None
        self._lineage: str | None = None
        self._share = StepShare(config.worker, config.workers)
        self._blocked = 0.0
        self._difference: dict[str, float] = {}

    def run(self) -> None:
        """Samples until the run is finished, then raises RunFinished. Raises UserError for data that cannot be used."""
        while True:
            self._lineage = None
            try:
                self._serve(self._load_newest())
            except LineageChanged:
                log.info("another training has begun in the run's directory", run=self._config.run)
            except WeightsLost as error:
                log.warning("loading the newest weights", reason=str(error))
                self._loaded = None

    def _serve(self, publication: Publication) -> None:
        """Samples for one training, until its directory holds another or none."""
        self._lineage = publication.lineage
        directory = worker_directory(self._config)
        place = {"worker": self._config.worker, "workers": self._config.workers}
        with hold(directory, **place):
            outbox = Outbox(directory, **place, start=publication.next_index, lineage=publication.lineage)
            log.info("sampling", run=self._config.run, next_problem=outbox.next_index)
            with closing(Delivery(self._client, outbox, ahead=self._config.sampling.prompts_per_round)) as delivery:
                try:
                    while True:
                        publication, count, waited = self._wait_for_work(outbox, delivery)
                        self._sample_round(outbox, publication, delivery, count, waited)
                except FileNotFoundError:
                    if not _is_being_deleted(outbox):
                        raise
                    log.warning(
                        "the run's directory was deleted: waiting for another training", directory=str(directory)
                    )

    def _wait_for_work(self, outbox: Outbox, delivery: Delivery) -> tuple[Publication, int, float]:
        """Waits until there is something to sample; returns the weights, which are loaded, how many groups, and the
        seconds waited."""
        began, most = time.monotonic(), self._config.sampling.prompts_per_round
        look_at = _LOST_SECONDS
        while True:
            publication = self._load_newest()
            delivery.check()  # batches that can never be delivered would be waited for forever
            seconds = time.monotonic() - began
            if publication.groups is None:
                waiting = self._waiting(outbox)
                count = most if waiting < publication.max_waiting else 0
                reason, pause = f"the trainer to train on {waiting} groups that wait for it", _ROOM_SECONDS
            else:
                count = min(most, self._share.left(publication, outbox))
                reason, pause = f"the trainer to publish the weights of step {publication.version + 1}", _STEP_SECONDS
            if count:
                return publication, count, seconds
            if publication.groups is not None and seconds > look_at and not outbox.waiting:
                look_at *= 2
                self._share.upload_again(self._client)
            self._wait(reason, seconds)
            time.sleep(pause)

    def _waiting(self, outbox: Outbox) -> int:
        """Groups of the run that wait to be trained on, in the server or here.

        Groups of other lineages may be among them. They expire as soon as this run's trainer asks for a batch.
        """
        here = outbox.waiting  # counted before the server's batches, so that no batch in transit is missed
        states = batches_by_state(self._client.queue(self._config.run), self._config.run)
        return here + sum(states[state] for state in (State.QUEUED, State.SCORING, State.READY))

    def _sample_round(
        self, outbox: Outbox, publication: Publication, delivery: Delivery, count: int, waited: float
    ) -> None:
        """Samples `count` groups and hands them to the delivery. The seconds are shared equally."""
        began = time.monotonic()
        blocked = delivery.blocked_seconds
        sampled = self._rounds.next(outbox.draw, publication, count)
        about = {
            "worker": self._config.worker,
            "sampling_seconds": (time.monotonic() - began) / len(sampled.groups),
            "judging_seconds": sampled.judging_seconds / len(sampled.groups),
            "waiting_seconds": (waited + self._blocked) / len(sampled.groups),
            **self._difference,
        }
        once = {**asdict(sampled.wasted), **reported(sampled.failures)}  # only in the round's first batch
        for group in sampled.groups:
            fields = {**group.about, **about, **once, **conversations.report(group.completions)}
            fields |= logged.report(group.judgement.logged, fields)
            sample = json.dumps(fields, ensure_ascii=False)
            sample = sample.encode(errors="replace").decode()  # lone surrogates of a problem, which servers refuse
            body = wire.encode(self._batch(publication, group, sample))
            if publication.groups is not None:
                self._share.add(body)
            delivery.send(group.index, body)
            once = {}
        self._blocked = delivery.blocked_seconds - blocked

    def _load_newest(self) -> Publication:
        """Loads the newest published weights into the sampler, unless they are loaded; waits until there are any."""
        started = time.monotonic()
        while (publication := self._weights.newest()) is None:
            where = self._weights.describe()
            self._wait(f"the trainer has not published weights in {where} yet", time.monotonic() - started)
            time.sleep(_WEIGHTS_SECONDS)
        if publication.finished:
            raise RunFinished
        if publication.run != self._config.run:
            where = self._weights.describe()
            raise UserError(f"run: {where} holds weights of run {publication.run!r}, not {self._config.run!r}")
        if self._lineage not in (None, publication.lineage):
            raise LineageChanged
        if publication != self._loaded:
            try:
                reader = f"{self._config.worker}-of-{self._config.workers}"
                with self._weights.reading(publication, reader) as model:
                    self._sampler.load(model)
            except OSError:
                time.sleep(_WEIGHTS_SECONDS)  # the directory may be being deleted
                if self._weights.newest() == publication:
                    raise
                return self._load_newest()  # it was replaced and removed while being read
            self._loaded = publication
            bound = self._config.sampling.max_logp_difference
            self._difference = compare(self._sampler, publication, bound, self._vocabulary)
        return publication

    def _batch(self, publication: Publication, group: JudgedGroup, sample: str) -> Batch:
        tokens, logps, finished = group_tokens(group.prompt, group.completions)
        params = self._rounds.params
        return Batch(
            id=str(uuid7()),
            run=publication.run,
            lineage=publication.lineage,
            epoch=publication.epoch,
            policy_version=int(group.versions.min()),
            policy_versions=group.versions if len(set(group.versions)) > 1 else None,
            temperature=params.temperature,
            group=tokens,
            rewards=group.judgement.rewards,
            finished=finished,
            sampler_logps=logps,
            loss_mask=loss_mask(group.completions),
            reward_parts=group.judgement.parts,
            steps=group.steps,
            top_p=params.top_p if params.top_p < 1 else None,
            top_k=params.top_k or None,
            task=group.problem.task or self._rounds.task_name,
            index=group.index,
            sample=sample,
        )


def _is_being_deleted(outbox: Outbox) -> bool:
    """Whether the outbox is being deleted: the missing file may have been the first of them."""
    deadline = time.monotonic() + _DELETING_SECONDS
    while outbox.is_there and time.monotonic() < deadline:
        time.sleep(_WEIGHTS_SECONDS)
    return not outbox.is_there


def compare(sampler: Sampler, publication: Publication, bound: float, vocabulary: int) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's, as metrics of the batches that it samples.

    An engine may silently keep a copy of old weights, and the run would train on samples of another policy. bound: the
    largest mean difference, in nats. vocabulary: rows of the model's embedding. Raises UserError if the mean is
    larger, or a token id lies outside the vocabulary.
    """
    if publication.probe is None:
        return {}
    group = publication.probe.group
    try:
        group.check_ids(vocabulary, "the model's vocabulary")
    except BatchError as error:
        raise UserError(
            f"weights: the probe published with version {publication.name} cannot be used: {error}",
            "give this worker the model that the run trains",
        ) from None
    mean, largest = publication.probe.difference(sampler.logps(group))
    if not mean <= bound:  # also if it is NaN
        raise UserError(
            f"sampling.max_logp_difference: after loading version {publication.version} the sampler's log-probs "
            f"differ from the trainer's by {mean:.3g} nats on average, {largest:.3g} at most; the bound is "
            f"{bound:g}.\n"
            "It does not sample from the policy that is trained: its engine has kept other weights, or computes "
            "otherwise",
            "restart the worker; raise the bound only if you know why",
        )
    return {"probe_logp_difference": mean, "probe_logp_difference_max": largest}
