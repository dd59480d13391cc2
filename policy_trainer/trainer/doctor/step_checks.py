"""Checks of the server, of one group that goes all the way, and of one full step."""

import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import SecretStr
from rich.console import Console

from policy_trainer.config import ENV_PREFIX, INLINE, TrainConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.processes.lifecycle.timing import Stopwatch
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup, read_samples
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.doctor.findings import Finding, Subject, not_checked, ok, refused, warning, wrong
from policy_trainer.trainer.observer import Observer, RunStart
from policy_trainer.trainer.queue_client.matching import check_first_kl, check_server
from policy_trainer.trainer.queue_client.server import connect, token_of, without_server
from policy_trainer.trainer.reference_servers import ReferenceServer, choose_server
from policy_trainer.trainer.run import train
from shared.api import QueueView, State
from shared.client import ClientError, RefServerClient, RefServerError
from shared.client.credentials import remedy
from shared.client.proxies import is_this_machine
from shared.devices import choose_device
from shared.errors import UserError
from shared.logprobs import slowed_by
from shared.spelling import spell_setting

# How long a server that is named may take to answer.
_PATIENCE_SECONDS = 15.0


def server(subject: Subject) -> Iterator[Finding]:
    """Starts a server where `train` would; it serves the later checks, too.

    Raises UserError for one that does not suit the run, RunFailed for one that dies.
    """
    directory = RunDirectory(subject.directory / "reference")
    config = subject.config.model_copy(update={"run_dir": directory.root})
    reference = choose_server(config, directory, note=lambda text: None)
    subject.stack.callback(reference.stop)
    reference.start(lambda reason, seconds: None, subject.outline)
    wait = partial(_wait, subject.config, reference)
    reference.await_answer(wait)
    subject.client = connect(config, reference.url, wait)
    subject.stack.callback(subject.client.close)
    try:
        subject.served, queue = check_server(subject.client, subject.config, subject.outline, subject.tokenizer)
    except ClientError as error:
        raise UserError(f"server: {error}", remedy(error, ENV_PREFIX)) from None
    subject.token = token_of(config)
    yield from _described(subject, queue)


def _wait(config: TrainConfig, server: ReferenceServer, reason: str, seconds: float) -> None:
    server.check()
    if config.server != INLINE and seconds > _PATIENCE_SECONDS:
        remedy = without_server(config)
        raise UserError(f"server: {reason.removesuffix(f'; {remedy}')}", remedy)


def _described(subject: Subject, queue: QueueView) -> Iterator[Finding]:
    config, client, model = subject.config, subject.client, subject.served
    if reason := client.not_ready_reason():
        yield wrong(f"{client.url} would not score a batch now: {reason}", "see its log, and wait until it is ready")
        return
    url = urlsplit(client.url)
    whose = "its own" if config.server == INLINE else "with TLS" if url.scheme == "https" else "without TLS"
    where = f"{model.dtype} on {model.device}, {model.forward} log-probs"
    scores = f"scores with {model.name} ({where})" if model.name else "has no model"
    waiting = sum(queue.states[state].batches for state in (State.QUEUED, State.SCORING, State.READY))
    yield ok(f"{client.url}, {whose}: {scores}; the token may train; {waiting} batches wait in the queue")
    if url.scheme == "http" and not is_this_machine(url.hostname or "") and (config.token or config.token_file):
        yield warning(
            "the token goes unencrypted to another machine",
            "give the server `--tls-cert` and `--tls-key`, use https://",
        )


def leave_nothing(client: RefServerClient, run: str, lineage: str) -> None:
    """Ends a run on the server and drops its batches. A token that may not drop leaves expired ones: they are the first
    to go when room is needed."""
    with suppress(ClientError):
        client.finish_run(run, lineage)
        for batch in client.batches(run=run):
            with suppress(RefServerError):  # the role may not drop batches, or a batch is being scored
                client.drop(batch.id)


_SHOWN = 160
_ANY_RUN = "give the doctor a token of role train without run=, or go on without this check"
_EVAL_PROBLEMS = 2
_GIB = 2**30
# What the trainer, the worker and the server do, in the words of the progress line.
STAGES = {
    "load model": "load the policy, its data and rewards",
    "server": "wait for the reference server (it loads at the same time)",
    "worker": "start a rollout worker, upload",
    "sample": "sample a group",
    "judge": "judge it",
    "score": "score it with the reference",
    "learn": "learn from it",
    "publish": "publish weights for the workers",
    "evaluate": "evaluate a few held-out problems, twice",
    "checkpoint": "write a checkpoint",
    "save model": "write the trained model",
}


class _ReportingStopwatch(Stopwatch):
    """Also reports the stage that begins."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._subject.report(STAGES.get(stage, stage))
        with super().__call__(stage):
            yield
        self._subject.report("wait for the group to be sampled, judged and scored")


class _FormObserver(Observer):
    """Remembers how the run computes log-probs, without its model, whose memory is to be free again."""

    form: str
    dtype: torch.dtype

    def begin(self, run: RunStart) -> None:
        super().begin(run)
        self.form, self.dtype = run.form, run.model.dtype


def group(subject: Subject) -> Iterator[Finding]:
    """Trains one step on one group, in a run of its own: what a real run would fail on at its start fails here. All
    that it writes is deleted.

    Raises what `train` raises, and KeyboardInterrupt when a stop was requested meanwhile.
    """
    trial, observer = _trial(subject), _FormObserver(stopwatch := _ReportingStopwatch(subject))
    try:
        result = train(trial, Console(quiet=True), observer, subject.world, trial=True)
    except RefServerError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        yield not_checked(f"because the token is only for other runs: {error.message}", _ANY_RUN)
        return
    finally:
        leave_nothing(subject.client, trial.run, RunDirectory(trial.run_dir).lineage)
    if not result.finished:
        raise KeyboardInterrupt
    subject.step, subject.group = what_happened(trial.run_dir)
    seconds = {**stopwatch.seconds, **_seconds_of_others(subject.config, subject.step)}
    yield ok("sampled, judged, uploaded, scored, leased, trained, published, evaluated, saved")
    yield ok("seconds: " + ", ".join(f"{stage} {seconds[stage]:.1f}" for stage in STAGES if stage in seconds))
    slow = slowed_by(observer.form, observer.dtype, choose_device(subject.config.device))
    yield ok(f"{observer.form} log-probs in the trainer: {slow or 'each prompt is computed once for its group'}")
    yield from _completions(subject.group.completions)


def _trial(subject: Subject) -> TrainConfig:
    """On the server of the earlier check. The KL does not end it, since a later check looks at that."""
    token = subject.token and SecretStr(subject.token)
    values = {"server": subject.client.url, "token": token, "weights": "directory"}
    return one_group(subject.config.model_copy(update=values), subject.directory)


def one_group(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """The settings of `train` for one step of one group, which trains even if its rewards are all equal."""
    ours = config.server == INLINE
    changed = {
        "sampling": {"prompts_per_round": 1, "max_resamples": 0, "regroup": 0},
        "loss": {"drop_zero_variance": False},
        "evaluation": {"problems": _EVAL_PROBLEMS, "eval_steps": 0},
        "checkpoint": {"save_steps": 1},
        "samples": {"every": 1, "prompts": 1},
        # The reference of a server that others use is not replaced.
        "reference": {} if ours else {"sync_steps": 0},
    }
    values = {name: getattr(config, name) for name in TrainConfig.model_fields}  # without those of DoctorConfig
    return TrainConfig.model_construct(**values).model_copy(
        update={
            "run_dir": run_dir,
            "run": run_dir.name,
            "resume": False,
            "rollout": "inline",
            "max_steps": 1,
            "num_train_epochs": None,
            "groups_per_step": 1,
            "max_waiting": 1,
            "minibatches": 1,
            "max_updates": None,
            "publish_every": 1,
            "expect_reference": "different",
            "record": None,
            "report_to": [],
            "show_samples": False,
            **{name: getattr(config, name).model_copy(update=values) for name, values in changed.items()},
        }
    )


def what_happened(run_dir: Path) -> tuple[Mapping[str, Any], SampledGroup]:
    """The step's record of metrics.jsonl and its group, once the trial in this directory has finished."""
    directory = RunDirectory(run_dir)
    step = next(record for record in read_metrics(directory.metrics) if record["kind"] == "step")
    return step, next(group for group in read_samples(directory.samples) if group.kind == "train")


def _seconds_of_others(config: TrainConfig, step: Mapping[str, Any]) -> dict[str, float]:
    """Of the worker and the server, as the step's metrics tell them."""
    judging = step["judging_seconds"]
    # A server that others use, too, does not tell what this group took it.
    inline = config.server == INLINE and config.scored_by_server
    scoring = {"score": step["server_scoring_seconds"] or 0.0} if inline else {}
    worked = step["sampling_seconds"] + sum(scoring.values())
    waited = max(0.0, step["waiting_seconds"] - worked)
    return {"worker": waited, "sample": step["sampling_seconds"] - judging, "judge": judging, **scoring}


def peak_gib(device: str) -> float:
    """Of the GPU, or of the process's main memory where there is none."""
    where = choose_device(device)
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # in KiB on Linux


def _completions(completions: Sequence[SampledCompletion]) -> Iterator[Finding]:
    ended = sum(item.finished for item in completions)
    text, most = repr(completions[0].text), max(item.tokens for item in completions)
    yield ok(f"a completion: {shorten(text, _SHOWN, placeholder=' …')}")
    seen = f"{ended} of {len(completions)} completions ended by themselves, the longest has {most} tokens"
    if ended:
        yield ok(seen)
    else:
        yield warning(
            seen,
            f"raise {spell_setting('sampling.max_completion_length')}, or see whether the model knows its EOS token",
        )


def first_kl(subject: Subject) -> Iterator[Finding]:
    """By the rule of `train`."""
    step, config = subject.step, subject.config
    dtype = str(subject.outline.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    kl, floor = (math.nan if step[name] is None else step[name] for name in ("kl_at_step_0", "kl_noise_floor"))
    try:
        message = check_first_kl(config, subject.served, dtype, kl, floor)
        yield ok(message or "there is no KL penalty, so nothing is compared")
    except RunFailed as error:
        yield refused(error)


def full_step(subject: Subject) -> Iterator[Finding]:
    step, config = subject.step, subject.config
    seen = (
        f"loss {_number(step['loss'])}, grad_norm {_number(step['grad_norm'])}, {step['tokens']} tokens in "
        f"{step['training_seconds']:.1f} s, peak memory {peak_gib(config.device):.2f} GiB"
    )
    if step["not_finite"]:
        remedy = (
            f"use {spell_setting('dtype', 'float32')}, lower {spell_setting('optimizer.learning_rate')}, and see that "
            "rewards and log-probs are finite"
        )
        yield wrong(f"{seen}: not finite", remedy)
        return
    largest = config.sampling.num_generations * config.sampling.max_completion_length
    yield ok(f"{seen}; the longest group has {largest} completion tokens")
    if config.loss.needs_variance and len({item.reward for item in subject.group.completions}) == 1:
        reward = subject.group.completions[0].reward
        yield ok(
            f"all its rewards are {reward:.3g}, so nothing was learned from this group; a run drops such groups, which "
            "does no harm if other groups differ"
        )


def _number(value: float | None) -> str:
    return "not a number" if value is None or math.isnan(value) else f"{value:.3g}"
