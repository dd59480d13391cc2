"""All checks in their order. A check that finds something wrong skips the checks that need it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from policy_trainer.doctor.findings import Finding, Subject, Verdict, not_checked, refused
from policy_trainer.doctor.setup_checks import devices, ends, memory, prompts, settings, versions, vocabulary, weights
from policy_trainer.doctor.step_checks import first_kl, full_step, group, server
from policy_trainer.doctor.task_checks import problems, rewards
from policy_trainer.lifecycle.endings import RunFailed
from shared.client import ClientError
from shared.errors import UserError


@dataclass(frozen=True)
class Check:
    """look: yields what it finds. needs: names of checks that must not be wrong."""

    name: str
    look: Callable[[Subject], Iterator[Finding]]
    needs: Sequence[str] = ()


CHECKS = (
    Check("settings", settings),
    Check("versions", versions),
    Check("devices", devices),
    Check("model", vocabulary),
    Check("task", problems),
    Check("prompts", prompts, ("model", "task")),
    Check("EOS", ends, ("model", "task")),
    Check("memory", memory, ("devices", "model", "prompts")),
    Check("weights", weights, ("memory",)),
    Check("rewards", rewards, ("model", "task", "prompts")),
    Check("server", server, ("weights",)),
    Check("one group", group, ("server", "rewards", "prompts", "EOS")),
    Check("first KL", first_kl, ("one group",)),
    Check("full step", full_step, ("one group",)),
)


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> Iterator[tuple[str, Finding]]:
    """(name of the check, finding), as they come."""
    failed: set[str] = set()
    for check in checks:
        if missing := next((need for need in check.needs if need in failed), None):
            failed.add(check.name)
            yield check.name, not_checked(f"because it needs `{missing}`, which is not right")
            continue
        subject.report(f"check: {check.name}")
        for finding in _look(check, subject):
            if finding.verdict in (Verdict.WRONG, Verdict.NOT_CHECKED):
                failed.add(check.name)
            yield check.name, finding


def _look(check: Check, subject: Subject) -> Iterator[Finding]:
    try:
        yield from check.look(subject)
    except (UserError, RunFailed, ClientError) as error:
        yield refused(error)
