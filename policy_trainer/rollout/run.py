"""Runs a worker: builds its parts, and finds the server of a worker whose trainer starts one."""

import time
from contextlib import ExitStack, closing

import structlog

from policy_trainer.config import INLINE, RolloutConfig, RunConfig
from policy_trainer.data.prompts import prompt_encoder, prompt_limit
from policy_trainer.data.rendering import load_prompt_tokenizer
from policy_trainer.data.tasks.compatibility import check_compatibility
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.processes.lifecycle.timing import logged_wait
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.device_turns import load_rollout_sampler
from policy_trainer.rollout.environments.rollouts import make_rollouts, open_sessions
from policy_trainer.rollout.outbox import worker_directory
from policy_trainer.rollout.rounds import Rounds
from policy_trainer.rollout.worker import RolloutWorker, RunFinished, until_finished
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_url
from policy_trainer.trainer.queue_client.matching import check_group_fits, check_models_match
from policy_trainer.trainer.queue_client.server import connect
from policy_trainer.weights.published.directory import WeightsDirectory
from policy_trainer.weights.published.download import DownloadedWeights
from policy_trainer.weights.published.publication import PublishedWeights
from shared.client.retry import OnWait
from shared.devices import describe_device
from shared.models import embedding_rows, eos_token_ids, use_threads

log = structlog.get_logger()

# Pause between looks for the trainer's server.
_LOOK_SECONDS = 0.2


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
    """The stack closes the worker's connections."""
    weights = _published_weights(config, stack)
    wait, outage = until_finished(weights, recurring=True), until_finished(weights)
    task = make_task(config)
    tokenizer = load_prompt_tokenizer(config.model, config.data, revision=config.revision)
    judge = RewardScorer(tokenizer, task, config)
    sessions = open_sessions(config, judge, stack)
    sampler, model = load_rollout_sampler(config, tokenizer, outage, wait)
    url = find_server(config, outage)
    client = stack.enter_context(connect(config, url, stay_with(config, url, outage)))
    reference, limit = client.model(), prompt_limit(model, config)
    check_models_match(reference, model, tokenizer, config.model)
    check_group_fits(reference, config.sampling, limit)
    images = reference.max_image_bytes
    for remark in check_compatibility(config, task, tokenizer, model, max_image_bytes=images):
        log.warning(str(remark))
    encoder = prompt_encoder(config, tokenizer, model, limit=limit, max_image_bytes=images)
    vocabulary = embedding_rows(model)
    rollouts = make_rollouts(config, sessions, tokenizer, eos_token_ids(model, tokenizer))
    rounds = Rounds(config, sampler, encoder, judge, task, rollouts, wait)
    return RolloutWorker(config, sampler, vocabulary, rounds, client, weights, wait)


def _published_weights(config: RolloutConfig, stack: ExitStack) -> PublishedWeights:
    """The weights in the run's directory, or on the server. The stack closes the connection."""
    if config.weights == "directory":
        return WeightsDirectory(RunDirectory(config.run_dir).weights)
    wait = logged_wait()
    client = connect(config, find_server(config, wait), wait)
    weights = DownloadedWeights(client, config.run, worker_directory(config) / "weights")
    return stack.enter_context(closing(weights))


def find_server(config: RunConfig, wait: OnWait) -> str:
    """The URL in the settings, or that of the server which the trainer starts; waits for it until `wait` raises."""
    if config.server != INLINE:
        return config.server
    began = time.monotonic()
    while (url := read_url(RunDirectory(config.run_dir))) is None:
        reason = f"the trainer has not started its reference server: there is no server.json in {config.run_dir} yet"
        wait(reason, time.monotonic() - began)
        time.sleep(_LOOK_SECONDS)
    return url


def stay_with(config: RunConfig, url: str, wait: OnWait) -> OnWait:
    """`wait`, which also raises RunFailed once the trainer's server has another URL: while no trainer runs, another
    program may take the port."""
    if config.server != INLINE:
        return wait

    def check(reason: str, seconds: float) -> None:
        now = read_url(RunDirectory(config.run_dir))
        if now not in (None, url):
            raise RunFailed(f"the trainer's reference server is at {now} now, not at {url}", "start this worker again")
        wait(reason, seconds)

    return check
