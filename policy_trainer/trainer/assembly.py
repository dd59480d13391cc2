"""Assembles a trainer from its configuration: what it opens, in which order, and how that is closed."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from rich.console import Console

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.config.marks import public_settings, settings_as_json
from policy_trainer.data.problem import Task
from policy_trainer.learner.ranks.world import World
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.lifecycle.endings import Stopped, StopRequest
from policy_trainer.reporting.display import Display, make_display
from policy_trainer.reporting.first_steps import FirstSteps, last_of_first
from policy_trainer.reporting.health import Health
from policy_trainer.reporting.metrics import MetricsFile, read_metrics
from policy_trainer.reporting.reward_failures import RewardFailures
from policy_trainer.reporting.sample_views import print_best_and_worst
from policy_trainer.reporting.samples import Samples, append_samples
from policy_trainer.reporting.server_metrics import ServerMetrics, settings_record
from policy_trainer.reporting.tracking import Trackers, start_trackers
from policy_trainer.rollout.device_turns import choose_turns, in_turn
from policy_trainer.rollout.sampling.engines import check_engine
from policy_trainer.run_files.checkpoint import RunFiles
from policy_trainer.trainer.observer import Observer
from policy_trainer.trainer.parts import BatchSource, Reporters, choose_workers
from policy_trainer.trainer.policy import Policy, check_model, load_policy, load_reward_scorer, warn_of_memory
from policy_trainer.trainer.queue_client.feed import LeaseFeed
from policy_trainer.trainer.queue_client.ledger import Ledger
from policy_trainer.trainer.queue_client.matching import check_first_kl, check_server
from policy_trainer.trainer.queue_client.server import KeptSamples, QueueWatch, connect, in_flight_allowance
from policy_trainer.trainer.queue_client.terms import BatchCheck, LeaseTerms
from policy_trainer.trainer.reference_servers import choose_server
from policy_trainer.trainer.train import Trainer
from policy_trainer.weights.published.publisher import BackgroundPublisher, choose_publisher
from policy_trainer.weights.quantised import check_quantisation
from policy_trainer.weights.reference.renewal import choose_renewal
from shared.api import Order
from shared.client import ClientError, RefServerClient
from shared.models import decode, eos_token_ids


def build_trainer(
    config: TrainConfig,
    task: Callable[[], Task],
    files: RunFiles,
    console: Console,
    stack: ExitStack,
    observer: Observer,
    world: World | None = None,
    forks: ForkServer | None = None,
) -> Trainer:
    """A trainer that is ready to run. The stack closes all that was opened, also after an error.

    task: makes the task. world: the ranks that share the policy, this one first. forks: starts server and worker.
    Raises UserError for what cannot be used, Stopped when a stop is requested meanwhile.
    """
    display = make_display(console, config.max_steps, files.state.step)
    stop = stack.enter_context(StopRequest())
    stack.callback(display.stop)
    on_terminal = console.is_terminal and console.file.isatty()
    server = choose_server(config, files.directory, display.note, on_terminal=on_terminal, forks=forks)
    stack.callback(server.stop)

    def wait(reason: str, seconds: float, *, recurring: bool = False) -> None:
        stop.check()
        display.waiting(reason, seconds, recurring=recurring)

    def outage(reason: str, seconds: float) -> None:
        stop.check()
        server.check()
        wait(server.describe(reason), seconds)

    display.note(_headline(config))
    # Mistakes in data and rewards show before anything starts.
    judge = load_reward_scorer(config, task(), files.resumed_from)
    check_quantisation(config.lora)
    if config.rollout == "inline":
        check_engine(config, lora_rank=config.lora.rank)
    outline = check_model(config, task(), files.resumed_from, judge, display)
    warn_of_memory(config, task(), files.resumed_from, judge, display, ranks=1 if world is None else world.size)
    server.start(wait, outline)  # before the policy, so that both load at the same time
    workers = choose_workers(config, server.url, files.directory, display.note, forks)
    stack.callback(workers.stop)
    stack.callback(server.begin_to_stop)
    if forks is not None and files.state.epoch == 0:  # else it would begin with an earlier process's weights
        workers.start()
    turns = choose_turns(config, partial(wait, recurring=True))
    if turns is not None:
        stack.callback(turns.close)
    with observer.stopwatch("load model"), in_turn(turns):
        policy = load_policy(config, task(), files.resumed_from, judge, turns, display, world)
        stack.callback(policy.close)
        if files.state.last_entropy is not None:
            policy.learner.restore_bonus(files.state.entropy_coef, files.state.last_entropy)
    stop.check()
    reporters = _make_reporters(config, server.url, files, policy, display, console, observer)

    @stack.push
    def close_reporters(kind: type[BaseException] | None, *_: object) -> None:
        reporters.metrics.close(failed=kind is not None)

    display.start()  # after the trackers, one of which may ask for a login
    client = connect(config, server.url, outage)
    stack.callback(client.close)
    with observer.stopwatch("server"):
        server.await_answer(outage)
        reference, queue = check_server(client, config, policy.learner.model, policy.tokenizer)
    located = config.reference.model_copy(update={"snapshot_root": server.snapshot_root})
    renewal = choose_renewal(
        config.model_copy(update={"reference": located}),
        files,
        policy.learner,
        policy.tokenizer,
        client,
        on_wait=outage,
        note=display.note,
    )
    kept = None
    if config.samples.every and queue.limits.keep_samples and not files.trial:
        once = connect(config, server.url, None, patience=0)
        stack.callback(once.close)
        kept = KeptSamples(once, policy.learner, display.note)
    weights = BackgroundPublisher(choose_publisher(config, client))
    stack.callback(weights.close)
    feed = _start_feed(client, config, files, policy, in_flight_allowance(queue), stop, stack)
    watch = QueueWatch(client, config.run, external=config.rollout == "external")
    first_kl = partial(check_first_kl, config, reference, str(policy.learner.model.dtype).removeprefix("torch."))
    source = BatchSource(feed, watch, kept, workers, weights, first_kl, renewal)
    feed.enter(on_wait=outage, note=display.note)
    return Trainer(config, files, policy, source, reporters, stop)


def _headline(config: TrainConfig) -> str:
    """What the run does, in one sentence."""
    rewards = f", rewards {', '.join(config.rewards)}" if config.rewards else ""
    return (
        f"run {config.run} in {config.run_dir}: {_count(config.max_steps, 'step')}, in each "
        f"{_count(config.groups_per_step, 'prompt')} with {_count(config.sampling.num_generations, 'completion')}; "
        f"task {config.task}{rewards}; "
        f"reference server: {'its own' if config.server == INLINE else config.server}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _make_reporters(
    config: TrainConfig,
    url: str,
    files: RunFiles,
    policy: Policy,
    display: Display,
    console: Console,
    observer: Observer,
) -> Reporters:
    """url: of the server."""
    past = read_metrics(files.directory.metrics)  # what an earlier process wrote
    trackers = start_trackers(config, files.state.step, display.note)
    writers = [partial(append_samples, files.directory.samples), *(tracker.write_samples for tracker in trackers)]
    if config.show_samples:
        writers.append(partial(print_best_and_worst, console))
    on_server: list[ServerMetrics] = []
    if not files.trial:
        once, after = connect(config, url, None, patience=0), files.state.step or -1
        server = ServerMetrics(once, config.run, files.lineage, after=after, past=past, note=display.note)
        server.write(settings_record(*public_settings(settings_as_json(config), TrainConfig)))
        writers.append(server.write_samples)
        on_server.append(server)
    tokenizer, eos = policy.tokenizer, set(eos_token_ids(policy.learner.model, policy.tokenizer))
    first = last_of_first(config.groups_per_step, config.max_steps)
    return Reporters(
        metrics=Trackers([MetricsFile(files.directory.metrics), *on_server, *trackers]),
        samples=Samples(config.samples, writers, partial(decode, tokenizer, skip_special_tokens=True), eos),
        health=Health(config.loss, past),
        first_steps=FirstSteps(
            first,
            tokenizer,
            policy.tagged_rewards,
            config.loss,
            apart=policy.part_weights if config.loss.advantage == "gdpo" else None,
        ),
        display=display,
        reward_failures=RewardFailures(last_of_first(config.groups_per_step, config.max_steps - files.state.step)),
        recording=config.record,
        observer=observer,
        past=past,
    )


def _start_feed(
    client: RefServerClient,
    config: TrainConfig,
    files: RunFiles,
    policy: Policy,
    allowance: int,
    stop: StopRequest,
    stack: ExitStack,
) -> LeaseFeed:
    """Starts to lease batches."""
    check = BatchCheck.of(policy.learner.model, config, policy.part_weights)
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
    ledger, version = Ledger(files.state.ledger), files.state.step
    feed = LeaseFeed(client, terms, ledger, check, ahead=ahead, allowance=allowance, version=version)

    @stack.callback
    def close_feed() -> None:
        stop.set()  # ends waits for the server: leases that are not released expire
        with suppress(Stopped, ClientError):
            feed.close()

    return feed
