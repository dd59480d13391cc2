"""Checks run in their order, and only where those that they need were right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.doctor.examination import examine
from policy_trainer.trainer.doctor.findings import Finding, Subject, Verdict, ok, refused, warning
from shared.errors import UserError
from tests.policy_trainer.trainer.doctor.subjects import subject_of


def good(subject: Subject) -> Iterator[Finding]:
    yield ok("it is there")
    yield warning("a bit small", "grow it")


def bad(subject: Subject) -> Iterator[Finding]:
    yield ok("the first half")
    raise UserError("task: it is empty", "fill it")


def test_what_needs_something_wrong_is_not_checked(model: Path) -> None:
    checks = {"a": (bad, ()), "b": (good, ()), "c": (good, ("a",)), "d": (good, ("c",)), "e": (good, ("b",))}
    with subject_of(model) as subject:
        findings = list(examine(subject, checks))
    assert [(name, finding.verdict) for name, finding in findings] == [
        ("a", Verdict.OK), ("a", Verdict.WRONG), ("b", Verdict.OK), ("b", Verdict.WARNING), ("c", Verdict.NOT_CHECKED),
        ("d", Verdict.NOT_CHECKED), ("e", Verdict.OK), ("e", Verdict.WARNING),
    ]  # fmt: skip
    assert (findings[1][1].seen, findings[1][1].remedy) == ("task: it is empty", "fill it")
    assert "`a`" in findings[4][1].seen


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({"sampling": {"num_generations": 4, "max_completion_length": 100_000}}, "prompts"),
        ({"task": "jsonl", "data": {"path": Path("nowhere.jsonl")}}, "task"),
    ],
)
def test_one_cause_is_one_finding_with_a_remedy(model: Path, settings: dict[str, Any], check: str) -> None:
    with subject_of(model, **settings) as subject:
        problems = [(name, finding) for name, finding in examine(subject) if finding.verdict is Verdict.WRONG]
    assert [name for name, _ in problems] == [check]
    assert problems[0][1].remedy


DIED = "the worker died with status 2; its last output:\ninfo: it begins\nrewards: no such name\nall of it is in /x"


@pytest.mark.parametrize(
    ("error", "seen", "remedy"),
    [
        (UserError("device: there is no cuda:1", "use auto; or cpu"), "device: there is no cuda:1", "use auto; or cpu"),
        (
            RunFailed("run: another one trains it; it lives:\nname", "stop it"),
            "run: another one trains it; it lives:\nname",
            "stop it",
        ),
        (RunFailed(DIED), "the worker died with status 2", "rewards: no such name"),
    ],
)
def test_an_error_is_split_into_what_is_wrong_and_what_to_do(error: Exception, seen: str, remedy: str) -> None:
    finding = refused(error)
    assert (finding.verdict, finding.seen, finding.remedy) == (Verdict.WRONG, seen, remedy)
