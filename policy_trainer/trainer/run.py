"""Builds a trainer from its configuration, and runs it."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.lifecycle.endings import RunFailed, Stopped, StopRequest
from policy_trainer.lifecycle.stopwatch import Stopwatch
from policy_trainer.queue_client.first_kl import choose_first_kl
from policy_trainer.queue_client.leases import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.matching import check_group_fits, check_models_match, check_reference, check_room
from policy_trainer.queue_client.queue_watch import QueueWatch
from policy_trainer.queue_client.server import LeaseTerms, connect, in_flight_allowance
from policy_trainer.reference.renewal import choose_renewal
from policy_trainer.reporting.display import Display, make_display
from policy_trainer.reporting.first_steps import FirstSteps, last_of_first
from policy_trainer.reporting.health import Health
from policy_trainer.reporting.metrics import MetricsFile, read_metrics, truncate_metrics
from policy_trainer.reporting.sample_views import TerminalSamples
from policy_trainer.reporting.samples import Samples, SamplesFile, SampleWriter
from policy_trainer.reporting.tracking import Tracker, Trackers, refuse_missing, start_trackers
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state
from policy_trainer.run_files.publish import latest
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.tasks.epochs import steps_of_epochs
from policy_trainer.tasks.registry import make_task
from policy_trainer.trainer.parts import BatchSource, Reporters, RunFiles
from policy_trainer.trainer.policy import Policy, load_policy
from policy_trainer.trainer.reference_servers import ReferenceServer, choose_server
from policy_trainer.trainer.train import Trainer
from policy_trainer.trainer.workers import choose_workers
from shared.api import ModelInfo, Order, QueueView
from shared.client import ClientError, RefServerClient
from shared.models import eos_token_ids, use_threads


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. seconds: of the training loop, in all processes of the run."""

    finished: bool
    steps: int
    seconds: float
    batches: int
    best_step: int | None


def train(config: TrainConfig, console: Console, stopwatch: Stopwatch | None = None) -> TrainResult:
    """Trains until the last step or a request to stop.

    stopwatch: gets the seconds of the trainer's stages.
    Raises UserError for a configuration that cannot be used, RunFailed for a run that cannot go on.
    """
    refuse_missing(config.report_to)
    use_threads(config.threads)
    counted = count_steps(config, console)
    with RunDirectory(config.run_dir).hold():
        files = open_run(config, console)  # config.toml keeps num_train_epochs, and a resumed run counts again
        with ExitStack() as stack, suppress(Stopped):
            build_trainer(counted, files, console, stack, stopwatch or Stopwatch()).run()
    state = files.state
    finished = state.step >= counted.max_steps
    if finished and not state.trained_tokens:
        raise RunFailed(
            f"{state.step} steps trained no token: no group had rewards that differ, or none could be judged.\n"
            f"The model in {files.directory.model} is the one that the run began with; docs/rewards.md has what to try"
        )
    return TrainResult(finished, state.step, state.training_seconds, state.batches, state.best_step)


def _headline(config: TrainConfig) -> str:
    """What the run does, for whoever has never seen one."""
    rewards = f", rewards {', '.join(config.rewards)}" if config.rewards else ""
    return (
        f"run {config.run} in {config.run_dir}: {config.max_steps} steps, in each {config.groups_per_step} prompts "
        f"with {config.sampling.num_generations} completions; task {config.task}{rewards}; "
        f"reference server: {'its own' if config.server == INLINE else config.server}"
    )


def count_steps(config: TrainConfig, console: Console) -> TrainConfig:
    """The configuration with the steps that num_train_epochs makes, where it decides them.

    Raises UserError for a task that has no epochs.
    """
    epochs = config.num_train_epochs
    if epochs is None:
        return config
    if config.max_steps:
        console.print(
            f"max_steps = {config.max_steps} is given, so num_train_epochs = {epochs:g} is not used; "
            "--max-steps 0 lets it decide",
            highlight=False,
        )
        return config
    steps = steps_of_epochs(config, make_task(config))
    console.print(f"num_train_epochs = {epochs:g}: {steps} steps of {config.groups_per_step} prompts", highlight=False)
    return config.model_copy(update={"max_steps": steps})


def open_run(config: TrainConfig, console: Console) -> RunFiles:
    """Opens the run's files, and removes what is later than the checkpoint to resume from.

    Raises UserError if the directory holds a run and resume is off.
    """
    directory = RunDirectory(config.run_dir)
    resumed = directory.open(config, console, resume=config.resume)
    lineage = directory.keep_lineage() if config.resume else directory.begin_lineage()
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    checkpoint = checkpoints.newest() if resumed else None
    state = _next_state(checkpoint, directory)
    if resumed:
        checkpoints.discard_after(state.step)
        truncate_metrics(directory.metrics, state.step)
        truncate_metrics(directory.samples, state.step)
    return RunFiles(directory, checkpoints, checkpoint, state, lineage)


def build_trainer(
    config: TrainConfig, files: RunFiles, console: Console, stack: ExitStack, stopwatch: Stopwatch
) -> Trainer:
    """A trainer that is ready to run. The stack closes all that was opened, also after an error.

    Raises UserError for what cannot be used, Stopped when a stop is requested meanwhile.
    """
    display = make_display(console, config.max_steps, files.state.step)
    stop = stack.enter_context(StopRequest())
    stack.callback(display.stop)
    server = choose_server(config, files.directory, display.note)
    stack.callback(server.stop)

    def wait(reason: str, seconds: float) -> None:
        stop.check()
        display.waiting(reason, seconds)

    def outage(reason: str, seconds: float) -> None:
        stop.check()
        server.check()
        wait(server.describe(reason), seconds)

    display.note(_headline(config))
    server.start(wait)  # before the policy, so that both load at the same time
    with stopwatch("load model"):
        policy = load_policy(config, files.resumed_from, display)
    stop.check()
    past = read_metrics(files.directory.metrics)
    trackers = start_trackers(config, files.state.step, display.note)  # before the display: one may ask for a login
    metrics = Trackers([MetricsFile(files.directory.metrics), *trackers])
    stack.callback(metrics.close)
    display.start()
    client = connect(config, server.url, outage)
    stack.callback(client.close)
    with stopwatch("server"):
        reference, queue = _check_server(client, config, policy)
    server.answered()
    renewal = choose_renewal(
        config.reference.model_copy(update={"snapshot_root": server.snapshot_root}),
        config.run,
        files.state,
        policy.learner,
        policy.tokenizer,
        client,
        files.checkpoints,
        on_wait=outage,
        note=display.note,
    )
    source = _make_source(client, config, server, files, in_flight_allowance(queue), display, stop, stack)
    source.feed.enter(on_wait=outage, note=display.note)
    first_steps = FirstSteps(
        last_of_first(config.groups_per_step, config.max_steps), policy.tokenizer, policy.tagged_rewards
    )
    samples = _make_samples(config, files.directory, trackers, policy, console)
    reporters = Reporters(metrics, samples, Health(config.loss, past), first_steps, display, stopwatch)
    first_kl = choose_first_kl(config, reference, str(policy.learner.model.dtype).removeprefix("torch."))
    evaluated = next((record for record in reversed(past) if record["kind"] == "evaluation"), {})
    return Trainer(config, files, policy, source, renewal, reporters, first_kl, stop, evaluated=evaluated)


def _next_state(checkpoint: Path | None, directory: RunDirectory) -> TrainState:
    """The state to resume from. A new epoch invalidates batches that were sampled after the checkpoint."""
    state = read_state(checkpoint) if checkpoint else TrainState()
    published = latest(directory.weights)
    if checkpoint or published:
        state.epoch = max(state.epoch, published.epoch if published else 0) + 1
    return state


def _check_server(client: RefServerClient, config: TrainConfig, policy: Policy) -> tuple[ModelInfo, QueueView]:
    """The server's model and queue. Raises UserError for a server whose model or limits do not suit the run."""
    reference = client.model()
    client.check_train_role()
    check_reference(reference, config.loss, config.model)
    check_models_match(reference, policy.learner.model, policy.tokenizer, config.model)
    check_group_fits(reference, config.sampling, prompt_limit(policy.learner.model, config))
    queue = client.queue()
    check_room(queue, config.groups_per_step)
    return reference, queue


def _make_samples(
    config: TrainConfig, directory: RunDirectory, trackers: Sequence[Tracker], policy: Policy, console: Console
) -> Samples:
    writers: list[SampleWriter] = [SamplesFile(directory.samples), *trackers]
    if config.show_samples:
        writers.append(TerminalSamples(console))
    tokenizer, eos = policy.tokenizer, set(eos_token_ids(policy.learner.model, policy.tokenizer))
    return Samples(config.samples, writers, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), eos)


def _make_source(
    client: RefServerClient,
    config: TrainConfig,
    server: ReferenceServer,
    files: RunFiles,
    allowance: int,
    display: Display,
    stop: StopRequest,
    stack: ExitStack,
) -> BatchSource:
    """Starts to lease batches."""
    ledger = Ledger(files.state.ledger)
    terms = LeaseTerms(
        consumer=f"trainer of {config.run}",
        run=config.run,
        epoch=files.state.epoch,
        max_lag=config.max_lag,
        order=Order(config.order),
        lease_seconds=config.lease_seconds,
        lineage=files.lineage,
    )
    # Half of the allowance may wait for a checkpoint. The other half is for this step and the batches leased ahead.
    ahead = max(1, min(config.groups_per_step, allowance // 2 - config.groups_per_step))
    feed = LeaseFeed(client, terms, ledger, config.loss, ahead=ahead, allowance=allowance, version=files.state.step)

    @stack.callback
    def close_feed() -> None:
        stop.set()  # ends waits for the server: leases that are not released expire
        with suppress(Stopped, ClientError):
            feed.close()

    workers = choose_workers(config, server.url, files.directory, display.note)
    stack.callback(workers.stop)  # runs before the other callbacks, and does not keep them from running if it fails
    return BatchSource(feed, ledger, QueueWatch(client, config.run), workers)
