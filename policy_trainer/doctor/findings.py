"""What a check found: a line of the doctor's table."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policy_trainer.lifecycle.endings import RunFailed


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """seen: what the check saw. remedy: what to do; empty where nothing is to be done."""

    verdict: Verdict
    seen: str
    remedy: str = ""


def ok(seen: str) -> Finding:
    return Finding(Verdict.OK, seen)


def warning(seen: str, remedy: str) -> Finding:
    return Finding(Verdict.WARNING, seen, remedy)


def wrong(seen: str, remedy: str) -> Finding:
    return Finding(Verdict.WRONG, seen, remedy)


def not_checked(reason: str, remedy: str = "") -> Finding:
    return Finding(Verdict.NOT_CHECKED, reason, remedy)


def refused(error: Exception) -> Finding:
    """An error that says what is wrong, and behind a line end or a semicolon what to do. The last words of a process
    that died say it in their last line."""
    text = str(error)
    if isinstance(error, RunFailed) and "its last output:" in text:
        said = [line for line in text.splitlines() if line.strip()]
        return wrong(said[0].partition(";")[0], _last_said(said))
    seen, _, remedy = text.partition("\n" if "\n" in text else "; ")
    return wrong(seen, remedy)


def _last_said(lines: Sequence[str]) -> str:
    """Without where a log is: it goes with the doctor's directory."""
    return [line for line in lines if not line.startswith(("all of it is in ", "it died "))][-1]
