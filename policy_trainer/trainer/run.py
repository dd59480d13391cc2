"""Builds what a training run needs, from its configuration, and runs it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.lifecycle.endings import Stopped, StopRequest
from policy_trainer.queue_client.leases import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.matching import check_group_fits, check_models_match, check_reference, check_room
from policy_trainer.queue_client.queue_watch import QueueWatch
from policy_trainer.queue_client.server import LeaseTerms, batches_by_state, connect, in_flight_allowance
from policy_trainer.reference.renewal import choose_renewal
from policy_trainer.reporting.display import Display, make_display
from policy_trainer.reporting.health import Health
from policy_trainer.reporting.metrics import MetricsFile, read_metrics, truncate_metrics
from policy_trainer.reporting.tracking import Trackers, refuse_missing, start_trackers
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state
from policy_trainer.run_files.publish import latest
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.policy import load_policy
from policy_trainer.trainer.train import Parts, Trainer
from policy_trainer.trainer.workers import ExternalWorkers, InlineWorker, Workers
from shared.api import Order, State
from shared.client import ClientError, RefServerClient
from shared.models import use_threads


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. seconds: of the training loop, over all lives of the run."""

    finished: bool
    steps: int
    seconds: float
    batches: int
    best_step: int | None


def train(config: TrainConfig, console: Console, on_outage: Callable[[], None] = lambda: None) -> TrainResult:
    """Trains until the last step or a request to stop.

    on_outage is called while the reference server does not answer; what it raises ends the run.
    Raises UserError for a configuration that cannot be used, RunFailed for a run that cannot go on.
    """
    refuse_missing(config.report_to)
    use_threads(config.threads)
    directory = RunDirectory(config.run_dir)
    resumed = directory.open(config, console, resume=config.resume)
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    checkpoint = checkpoints.newest() if resumed else None
    state = _next_state(checkpoint, directory)
    if resumed:
        checkpoints.discard_after(state.step)
        truncate_metrics(directory.metrics, state.step)
    display = make_display(console, config.max_steps, state.step)
    with StopRequest() as stop:
        try:
            _run(config, directory, checkpoint, state, display, stop, checkpoints, on_outage)
        except Stopped:
            pass
        finally:
            display.stop()
    return TrainResult(
        state.step >= config.max_steps, state.step, state.training_seconds, state.batches, state.best_step
    )


def _run(
    config: TrainConfig,
    directory: RunDirectory,
    checkpoint: Path | None,
    state: TrainState,
    display: Display,
    stop: StopRequest,
    checkpoints: Checkpoints,
    on_outage: Callable[[], None],
) -> None:
    def outage(reason: str, seconds: float) -> None:
        stop.check()
        on_outage()
        display.waiting(reason, seconds)

    policy = load_policy(config, checkpoint, display)
    stop.check()
    trackers = start_trackers(config, state.step, display.note)  # which may ask for a login: before the display
    display.start()
    client = connect(config, outage)
    reference = client.model()
    check_reference(reference, config.loss, config.model)
    check_models_match(reference, policy.learner.model, policy.tokenizer, config.model)
    check_group_fits(reference, config.sampling, prompt_limit(policy.learner.model, config))
    allowance = _look_at_queue(client, config, display, resumed=checkpoint is not None)
    renewal = choose_renewal(
        config.reference,
        config.run,
        state,
        policy.learner,
        policy.tokenizer,
        client,
        checkpoints,
        on_wait=outage,
        note=display.note,
    )
    ledger = Ledger(state.ledger)
    workers = choose_workers(config, directory, display.note)
    metrics = Trackers([MetricsFile(directory.metrics), *trackers])
    past = read_metrics(directory.metrics)
    feed = _make_feed(client, config, state, ledger, allowance)
    try:
        Trainer(
            Parts(
                config=config,
                directory=directory,
                state=state,
                ledger=ledger,
                tokenizer=policy.tokenizer,
                learner=policy.learner,
                sampler=policy.sampler,
                evaluator=policy.evaluator,
                watch=QueueWatch(client, config.run),
                feed=feed,
                workers=workers,
                checkpoints=checkpoints,
                renewal=renewal,
                metrics=metrics,
                health=Health(config.loss, past),
                display=display,
                stop=stop,
                accuracy=next((one["accuracy"] for one in reversed(past) if one["kind"] == "evaluation"), None),
            )
        ).run()
    finally:
        workers.stop()
        stop.set()  # whoever still waits for the server gives up: leases that are not given back run out
        with suppress(Stopped, ClientError):
            feed.close()
        metrics.close()
        client.close()


def _make_feed(
    client: RefServerClient, config: TrainConfig, state: TrainState, ledger: Ledger, allowance: int
) -> LeaseFeed:
    terms = LeaseTerms(
        consumer=f"trainer of {config.run}",
        run=config.run,
        epoch=state.epoch,
        max_lag=config.max_lag,
        order=Order(config.order),
        lease_seconds=config.lease_seconds,
    )
    # Half of the allowance may wait for a checkpoint; of the other, what is leased ahead must not be all.
    ahead = max(1, min(config.groups_per_step, allowance // 2 - config.groups_per_step))
    return LeaseFeed(client, terms, ledger, config.loss, ahead=ahead, allowance=allowance, version=state.step)


def _next_state(checkpoint: Path | None, directory: RunDirectory) -> TrainState:
    """The state to resume from. A new epoch invalidates batches sampled after the checkpoint."""
    state = read_state(checkpoint) if checkpoint else TrainState()
    published = latest(directory.weights)
    if checkpoint or published:
        state.epoch = max(state.epoch, published.epoch if published else 0) + 1
    return state


def choose_workers(config: TrainConfig, directory: RunDirectory, note: Callable[[str], None]) -> Workers:
    if config.rollout == "inline":
        return InlineWorker(directory.config, directory.logs / "rollout.log", note, config.token)
    return ExternalWorkers(directory.config)


def _look_at_queue(client: RefServerClient, config: TrainConfig, display: Display, *, resumed: bool) -> int:
    """How many batches may be leased and not yet acked. Tells of batches that are there already.

    Raises UserError for a queue in which a step would wait for ever.
    """
    queue = client.queue()
    check_room(queue, config.groups_per_step)
    states = batches_by_state(queue, config.run)
    waiting = sum(states[state] for state in (State.QUEUED, State.SCORING, State.READY, State.LEASED))
    if waiting and not resumed:
        # Of another run of that name, most likely.
        display.note(f"the server already holds {waiting} batches of run {config.run!r}: they will be trained on")
    return in_flight_allowance(queue)
