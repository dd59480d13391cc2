"""The rollout worker: it loads the published weights, samples, judges and uploads, and waits when the queue is full."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict

import structlog
from uuid6 import uuid7

from policy_trainer.config import RolloutConfig, WeightsPlace
from policy_trainer.data.completion import group_tokens
from policy_trainer.data.problem import Task
from policy_trainer.data.prompts import PromptEncoder, prompt_limit
from policy_trainer.lifecycle.timing import LoggedWait
from policy_trainer.queue_client.matching import check_group_fits, check_models_match
from policy_trainer.queue_client.server import batches_by_state, connect
from policy_trainer.reporting.reward_failures import reported
from policy_trainer.rewards.judging import Judge
from policy_trainer.rollout.comparison import compare
from policy_trainer.rollout.delivery import Delivery
from policy_trainer.rollout.found_server import find_server, stay_with
from policy_trainer.rollout.outbox import Outbox, hold
from policy_trainer.rollout.own_directory import own_directory
from policy_trainer.rollout.rounds import Rounds
from policy_trainer.rollout.sampled_group import SampledGroup
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.turns import LOADERS
from policy_trainer.sampling.sampler import Sampler, WeightsLost, sampling_params
from policy_trainer.tasks.registry import make_task
from policy_trainer.weights.directory import WeightsDirectory
from policy_trainer.weights.download import DownloadedWeights
from policy_trainer.weights.publication import Publication, PublishedWeights
from shared import wire
from shared.api import State
from shared.batch import RolloutBatch
from shared.client import RefServerClient
from shared.devices import describe_device
from shared.errors import UserError
from shared.logprobs import embedding_rows
from shared.models import load_tokenizer, use_threads

log = structlog.get_logger()

# Pauses between looks for published weights, and between looks at the server's queue.
_WEIGHTS_SECONDS = 0.2
_ROOM_SECONDS = 0.1
# How long the deletion of a run's directory may take.
_DELETING_SECONDS = 5.0


class RunFinished(Exception):
    """The trainer has finished the run."""


class AnotherTraining(Exception):
    """The run's directory holds another training than before: it was deleted and begun again."""


class Waiting(LoggedWait):
    """Also raises RunFinished once the run is finished."""

    def __init__(self, weights: PublishedWeights) -> None:
        super().__init__()
        self._weights = weights

    def __call__(self, reason: str, seconds: float) -> None:
        publication = self._weights.newest()
        if publication and publication.finished:
            raise RunFinished
        super().__call__(reason, seconds)


class RolloutWorker:
    """One worker. Its parts are arguments, so that a test can pass fakes. vocabulary: rows of the model's embedding."""

    def __init__(
        self,
        config: RolloutConfig,
        sampler: Sampler,
        vocabulary: int,
        encoder: PromptEncoder,
        judge: Judge,
        task: Task,
        client: RefServerClient,
        weights: PublishedWeights,
        wait: Waiting,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._rounds = Rounds(config, sampler, encoder, judge, task)
        self._task = task
        self._client = client
        self._wait = wait
        self._weights = weights
        self._loaded: Publication | None = None
        self._lineage: str | None = None
        self._blocked = 0.0
        self._difference: dict[str, float] = {}
        self._params = sampling_params(config.sampling)

    def run(self) -> None:
        """Samples until the run is finished, then raises RunFinished. Raises UserError for data that cannot be used."""
        while True:
            self._lineage = None
            try:
                self._serve(self._load_newest())
            except AnotherTraining:
                log.info("another training has begun in the run's directory", run=self._config.run)
            except WeightsLost as error:
                log.warning("loading the newest weights", reason=str(error))
                self._loaded = None

    def _serve(self, publication: Publication) -> None:
        """Samples for one training, until its directory holds another or none."""
        self._lineage = publication.lineage
        directory = own_directory(self._config)
        place = {"worker": self._config.worker, "workers": self._config.workers}
        with hold(directory, **place):
            outbox = Outbox(directory, **place, start=publication.next_index, lineage=publication.lineage)
            log.info("sampling", run=self._config.run, next_problem=outbox.next_index)
            with closing(Delivery(self._client, outbox, ahead=self._config.sampling.prompts_per_round)) as delivery:
                try:
                    self._sample_rounds(outbox, delivery)
                except FileNotFoundError:
                    if not _goes(outbox):
                        raise
                    log.warning(
                        "the run's directory was deleted: waiting for another training", directory=str(directory)
                    )

    def _sample_rounds(self, outbox: Outbox, delivery: Delivery) -> None:
        while True:
            waited = self._wait_for_room(outbox, delivery)
            self._sample_round(outbox, self._load_newest(), delivery, waited)

    def _wait_for_room(self, outbox: Outbox, delivery: Delivery) -> float:
        """Waits while max_waiting groups wait to be trained on, in the server or here; returns the seconds waited.

        Groups of other lineages may be among them. They expire as soon as this run's trainer asks for a batch.
        """
        began = time.monotonic()
        while True:
            bound = self._load_newest().max_waiting
            delivery.check()  # what can never be delivered would be waited for without end
            here = outbox.waiting  # counted before the server's, so that one on its way is counted
            states = batches_by_state(self._client.queue(self._config.run), self._config.run)
            waiting = here + sum(states[state] for state in (State.QUEUED, State.SCORING, State.READY))
            seconds = time.monotonic() - began
            if waiting < bound:
                return seconds
            self._wait(f"the trainer to train on {waiting} groups that wait for it", seconds)
            time.sleep(_ROOM_SECONDS)

    def _sample_round(self, outbox: Outbox, publication: Publication, delivery: Delivery, waited: float) -> None:
        """Samples prompts_per_round groups and hands them to the delivery. The seconds are shared equally."""
        began = time.monotonic()
        blocked = delivery.blocked_seconds
        sampled = self._rounds.next(outbox.draw, publication)
        about = {
            "worker": self._config.worker,
            "sampling_seconds": (time.monotonic() - began) / len(sampled.groups),
            "judging_seconds": sampled.judging_seconds / len(sampled.groups),
            "waiting_seconds": (waited + self._blocked) / len(sampled.groups),
            **self._difference,
        }
        once = {**asdict(sampled.wasted), **reported(sampled.failures)}  # only the round's first batch carries it
        for group in sampled.groups:
            sample = json.dumps({**group.about, **about, **once}, ensure_ascii=False)
            sample = sample.encode(errors="replace").decode()  # lone surrogates of a problem, which servers refuse
            delivery.send(group.drawn.index, wire.encode(self._batch(publication, group, sample)))
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
            raise AnotherTraining
        if publication != self._loaded:
            try:
                reader = f"{self._config.worker}-of-{self._config.workers}"
                with self._weights.reading(publication, reader) as model:
                    self._sampler.load(model)
            except OSError:
                time.sleep(_WEIGHTS_SECONDS)  # somebody may be deleting the directory
                if self._weights.newest() == publication:
                    raise
                return self._load_newest()  # it was replaced and removed while we were reading it
            self._loaded = publication
            bound = self._config.sampling.max_logp_difference
            self._difference = compare(self._sampler, publication, bound, self._vocabulary)
        return publication

    def _batch(self, publication: Publication, group: SampledGroup, sample: str) -> RolloutBatch:
        tokens, logps, finished = group_tokens(group.drawn.ids, group.completions)
        return RolloutBatch(
            id=str(uuid7()),
            run=publication.run,
            lineage=publication.lineage,
            epoch=publication.epoch,
            policy_version=int(group.versions.min()),
            policy_versions=group.versions if len(set(group.versions)) > 1 else None,
            temperature=self._params.temperature,
            group=tokens,
            rewards=group.judgement.rewards,
            finished=finished,
            sampler_logps=logps,
            reward_parts=group.judgement.parts,
            steps=group.steps,
            top_p=self._params.top_p if self._params.top_p < 1 else None,
            top_k=self._params.top_k or None,
            task=group.drawn.problem.task or self._task.name,
            sample=sample,
        )


def _goes(outbox: Outbox) -> bool:
    """Whether the outbox is deleted now: file by file, the one that is missing may have been the first."""
    deadline = time.monotonic() + _DELETING_SECONDS
    while outbox.is_there and time.monotonic() < deadline:
        time.sleep(_WEIGHTS_SECONDS)
    return not outbox.is_there


def _in_directory(config: RolloutConfig, stack: ExitStack) -> PublishedWeights:
    return WeightsDirectory(RunDirectory(config.run_dir).weights)


def _on_server(config: RolloutConfig, stack: ExitStack) -> PublishedWeights:
    wait = LoggedWait()
    client = connect(config, find_server(config, wait), wait)
    weights = DownloadedWeights(client, config.run, own_directory(config) / "weights")
    return stack.enter_context(closing(weights))


_WEIGHTS: Mapping[WeightsPlace, Callable[[RolloutConfig, ExitStack], PublishedWeights]] = {
    "directory": _in_directory,
    "server": _on_server,
}


def run_worker(config: RolloutConfig) -> None:
    """Loads the sampler, checks that the server's reference matches it, and works until the run is finished."""
    use_threads(config.threads)
    log.info("device", device=describe_device(config.device))
    with ExitStack() as stack:
        try:
            _make_worker(config, stack).run()
        except RunFinished:
            log.info("the run is finished")


def _make_worker(config: RolloutConfig, stack: ExitStack) -> RolloutWorker:
    """The stack closes its connections."""
    weights = _WEIGHTS[config.weights](config, stack)
    wait = Waiting(weights)
    task = make_task(config)
    tokenizer = load_tokenizer(config.model, revision=config.revision)
    judge = Judge(tokenizer, task, config)
    loaded = LOADERS[config.vllm.enable_sleep_mode](config, tokenizer, wait)
    url = find_server(config, wait)
    client = stack.enter_context(connect(config, url, stay_with(config, url, wait)))
    reference, limit = client.model(), prompt_limit(loaded.model, config)
    check_models_match(reference, loaded.model, tokenizer, config.model)
    check_group_fits(reference, config.sampling, limit)
    encoder = PromptEncoder(tokenizer, config.data, limit=limit)
    vocabulary = embedding_rows(loaded.model)
    return RolloutWorker(config, loaded.sampler, vocabulary, encoder, judge, task, client, weights, wait)
