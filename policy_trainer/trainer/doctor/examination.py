"""All checks in their order. A check that finds something wrong skips the checks that need it."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.doctor.findings import Finding, Subject, Verdict, not_checked, refused
from policy_trainer.trainer.doctor.setup_checks import (
    devices,
    ends,
    memory,
    prompts,
    settings,
    versions,
    vocabulary,
    weights,
)
from policy_trainer.trainer.doctor.step_checks import first_kl, full_step, group, server
from policy_trainer.trainer.doctor.task_checks import problems, rewards
from shared.client import ClientError
from shared.errors import UserError

Check = Callable[[Subject], Iterator[Finding]]
# Name -> the check, and the names of those that must not be wrong.
CHECKS: Mapping[str, tuple[Check, Sequence[str]]] = {
    "settings": (settings, ()),
    "versions": (versions, ()),
    "devices": (devices, ()),
    "model": (vocabulary, ()),
    "task": (problems, ()),
    "prompts": (prompts, ("model", "task")),
    "EOS": (ends, ("model", "task")),
    "memory": (memory, ("devices", "model", "prompts")),
    "weights": (weights, ("memory",)),
    "rewards": (rewards, ("model", "task", "prompts")),
    "server": (server, ("weights",)),
    "one group": (group, ("server", "rewards", "prompts", "EOS")),
    "first KL": (first_kl, ("one group",)),
    "full step": (full_step, ("one group",)),
}


def examine(
    subject: Subject, checks: Mapping[str, tuple[Check, Sequence[str]]] = CHECKS
) -> Iterator[tuple[str, Finding]]:
    """(name of the check, finding), as they come."""
    failed: set[str] = set()
    for name, (look, needs) in checks.items():
        if missing := next((need for need in needs if need in failed), None):
            failed.add(name)
            yield name, not_checked(f"because it needs `{missing}`, which is not right")
            continue
        subject.report(f"check: {name}")
        for finding in _findings(look, subject):
            if finding.verdict in (Verdict.WRONG, Verdict.NOT_CHECKED):
                failed.add(name)
            yield name, finding


def _findings(look: Check, subject: Subject) -> Iterator[Finding]:
    try:
        yield from look(subject)
    except (UserError, RunFailed, ClientError) as error:
        yield refused(error)
