"""Runs for the doctor: a tiny model on disk, and a configuration of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from policy_trainer.config import DoctorConfig
from policy_trainer.trainer.doctor.findings import Finding, Subject, Verdict
from shared.settings import from_values


@contextmanager
def subject_of(model: Path, **settings: Any) -> Iterator[Subject]:
    sampling = {"num_generations": 4, "max_completion_length": 12}
    values = {"model": str(model), "device": "cpu", "threads": 1, "run_dir": model.parent / "runs" / "mine"}
    with ExitStack() as stack:
        config = from_values(DoctorConfig, **{**values, "sampling": sampling, **settings})
        yield Subject(config, stack, lambda text: None)


def looked(check: Callable[[Subject], Iterator[Finding]], model: Path, **settings: Any) -> list[Finding]:
    with subject_of(model, **settings) as subject:
        return list(check(subject))


def verdicts(findings: list[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]
