"""The last checks: one group goes all the way, and a copy of the policy trains one full step on it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from textwrap import shorten

from pydantic import SecretStr
from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.doctor.findings import Finding, not_checked, ok, refused, warning, wrong
from policy_trainer.doctor.server_checks import leave_nothing
from policy_trainer.doctor.subject import Subject, Trained
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.timing import Stopwatch
from policy_trainer.queue_client.matching import choose_first_kl
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.dry_run import STAGES, one_group, peak_gib, what_happened
from policy_trainer.trainer.run import train
from shared.client import RefServerError

_SHOWN = 160
_ANY_RUN = "give the doctor a token of role train without run=, or go on without this check"


class _Telling(Stopwatch):
    """Also says which stage is under way."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._subject.say(STAGES.get(stage, stage))
        with super().__call__(stage):
            yield
        self._subject.say("wait for the group to be sampled, judged and scored")


def group(subject: Subject) -> Iterator[Finding]:
    """Trains on one group of a run of its own; all that it writes is thrown away.

    Raises what `train` raises, and KeyboardInterrupt when a stop was requested meanwhile.
    """
    trial, stopwatch = _trial(subject), _Telling(subject)
    try:
        result = train(trial, Console(quiet=True), stopwatch)
    except RefServerError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        yield not_checked(f"because the token is for other runs alone: {error.message}", _ANY_RUN)
        return
    finally:
        leave_nothing(subject.served.client, trial.run, RunDirectory(trial.run_dir).lineage)
    if not result.finished:
        raise KeyboardInterrupt
    subject.trained = Trained(*what_happened(trial.run_dir), peak_gib(trial.device))
    yield ok("sampled, judged, uploaded, scored, leased, trained, published, evaluated, saved")
    yield from _completions(subject.trained)


def _trial(subject: Subject) -> TrainConfig:
    """On the server of the earlier check. The KL does not end it: it is a check of its own."""
    token = subject.served.token and SecretStr(subject.served.token)
    config = subject.config.model_copy(
        update={"server": subject.served.client.url, "token": token, "weights": "directory"}
    )
    return one_group(config, subject.directory).model_copy(update={"expect_reference": "different"})


def _completions(trained: Trained) -> Iterator[Finding]:
    completions = trained.group.completions
    ended = sum(item.finished for item in completions)
    text, most = repr(completions[0].text), max(item.tokens for item in completions)
    yield ok(f"a completion: {shorten(text, _SHOWN, placeholder=' …')}")
    said = f"{ended} of {len(completions)} completions ended by themselves, the longest has {most} tokens"
    if ended:
        yield ok(said)
    else:
        yield warning(said, "raise --sampling.max-completion-length, or see whether the model knows its EOS token")


def first_kl(subject: Subject) -> Iterator[Finding]:
    """By the rule of `train`."""
    step, config = subject.trained.step, subject.config
    dtype = str(subject.outline.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    rule = choose_first_kl(config, subject.served.model, dtype)
    kl, floor = (math.nan if step[name] is None else step[name] for name in ("kl_at_step_0", "kl_noise_floor"))
    try:
        yield ok(rule.check(kl, floor) or "there is no KL penalty, so nothing is compared")
    except RunFailed as error:
        yield refused(error)


def full_step(subject: Subject) -> Iterator[Finding]:
    step, config = subject.trained.step, subject.config
    said = (
        f"loss {_number(step['loss'])}, grad_norm {_number(step['grad_norm'])}, {step['tokens']} tokens in "
        f"{step['training_seconds']:.1f} s, peak memory {subject.trained.peak_gib:.2f} GiB"
    )
    if step["not_finite"]:
        remedy = "use --dtype float32, lower --optimizer.learning-rate, and see that rewards and log-probs are finite"
        yield wrong(f"{said}: not finite", remedy)
        return
    largest = config.sampling.num_generations * config.sampling.max_completion_length
    yield ok(f"{said}; the longest group has {largest} completion tokens")
    if len({item.reward for item in subject.trained.group.completions}) == 1:
        reward = subject.trained.group.completions[0].reward
        yield ok(
            f"all its rewards are {reward:.3g}, so this group taught nothing; a run drops such groups, and is right if "
            "others differ"
        )


def _number(value: float | None) -> str:
    return "not a number" if value is None or math.isnan(value) else f"{value:.3g}"
