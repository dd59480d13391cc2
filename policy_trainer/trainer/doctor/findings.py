"""What the checks look at, and what they find."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import PromptEncoder, prompt_encoder
from policy_trainer.data.rendering import load_prompt_tokenizer
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.learner.ranks.world import World
from policy_trainer.processes.lifecycle.endings import RunFailed, signals_deferred
from policy_trainer.reporting.samples import SampledGroup
from policy_trainer.trainer.plan import prompt_lengths
from shared.api import ModelInfo
from shared.client import ClientError, RefServerClient
from shared.client.credentials import remedy
from shared.errors import ExpectedError, UserError, printable
from shared.models import load_outline
from shared.spelling import spell_name, spell_setting

# Problems that the checks draw.
_PROBLEMS = 3


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
    """What an error says is wrong, and what to do. For a process that died, its last line of output says what to do."""
    if isinstance(error, RunFailed) and "its last output:" in error.problem:
        # Without the place of the log, which is deleted with the doctor's directory.
        logs = ("all of it is in ", "it died ")
        lines = [line for line in error.problem.splitlines() if line.strip() and not line.startswith(logs)]
        return wrong(lines[0].partition(";")[0], lines[-1])
    if isinstance(error, ExpectedError):
        return wrong(error.problem, error.remedy)
    return wrong(str(error), remedy(error, ENV_PREFIX) if isinstance(error, ClientError) else "")


_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}
_WIDTHS = (9, 11)


def print_findings(findings: Iterable[tuple[str, Finding]], console: Console) -> Iterator[tuple[str, Finding]]:
    """Prints each finding, with the name of its check, as soon as it is there, and passes it on."""
    before = ""
    for name, finding in findings:
        console.print(_row("" if name == before else name, finding))
        before = name
        yield name, finding


def _row(name: str, finding: Finding) -> Table:
    row = Table.grid(padding=(0, 1))
    for width in _WIDTHS:
        row.add_column(width=width)
    row.add_column(overflow="fold")
    row.add_row(name, Text(finding.verdict, _COLOURS[finding.verdict]), Text(printable(finding.seen, keep="\n")))
    if finding.remedy:
        row.add_row("", "", Text(printable(f"-> {finding.remedy}", keep="\n"), "bold"))
    return row


def conclusion(findings: Sequence[tuple[str, Finding]]) -> str:
    problems = sum(finding.verdict is Verdict.WRONG for _, finding in findings)
    if not problems:
        return "the run may begin"
    several = problems > 1
    return f"{problems} problem{'s' if several else ''}: fix {'them' if several else 'it'} and run doctor again"


class Subject:
    """A run that has not begun. Its parts raise UserError.

    stack: closes what the checks leave open. report: is called with the work that begins. world: the ranks under
    torchrun; this is rank 0. client, token, served: the connection to the server, its access token, the model it scores
    with; set by the server check.
    step, group: metrics record and samples of the trial group; set by its check.
    """

    client: RefServerClient
    token: str | None
    served: ModelInfo
    step: Mapping[str, Any]
    group: SampledGroup

    def __init__(
        self, config: TrainConfig, stack: ExitStack, report: Callable[[str], None], world: World | None = None
    ) -> None:
        self.config = config
        self.stack = stack
        self.report = report
        self.world = world

    @property
    def ranks(self) -> int:
        return 1 if self.world is None else self.world.size

    @cached_property
    def outline(self) -> PreTrainedModel:
        """The model without its weights."""
        return load_outline(self.config.model, revision=self.config.revision)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_prompt_tokenizer(self.config.model, self.config.data, revision=self.config.revision)

    @cached_property
    def task(self) -> Task:
        return make_task(self.config)

    @cached_property
    def drawn(self) -> list[Problem]:
        return [self.task.problem(index) for index in range(_PROBLEMS)]

    @cached_property
    def encoder(self) -> PromptEncoder:
        return prompt_encoder(self.config, self.tokenizer, self.outline)

    @cached_property
    def lengths(self) -> tuple[list[int], list[str]]:
        return prompt_lengths(self.encoder, self.task)

    @cached_property
    def directory(self) -> Path:
        """For all that the checks write, next to RUN_DIR: on the disk that the run will use.

        Raises UserError if nothing can be written there.
        """
        above = next(path for path in self.config.run_dir.absolute().parents if path.is_dir())
        try:
            with signals_deferred():
                return Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-", dir=above)))
        except OSError as error:
            raise UserError(
                f"{spell_name('run_dir')}: {above} cannot be written: {error.strerror}",
                f"choose another {spell_setting('run_dir')}",
            ) from None
