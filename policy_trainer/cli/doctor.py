"""The command `doctor`, also under torchrun."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.training import run_as_rank
from policy_trainer.config import DoctorConfig
from policy_trainer.processes.variables import in_torchrun

if TYPE_CHECKING:  # PyTorch loads late, so that wrong options fail at once
    from policy_trainer.learner.ranks.world import World

COLUMNS = 120


def run(arguments: list[str]) -> int:
    """Prints a table, or JSON with --json. Returns 1 if there is a problem.

    With --json the table of the checks goes to standard error.
    """
    # Not a setting: then POLICY_TRAINER_JSON in the environment would belong to every command of the run.
    as_json = "--json" in arguments
    config = read_settings(DoctorConfig, [argument for argument in arguments if argument != "--json"], "doctor")
    if config.plan:
        return _plan(config, as_json=as_json) if os.environ.get("RANK", "0") == "0" else 0
    if not in_torchrun():
        return _examine(config, as_json=as_json)

    def lead(world: "World") -> int:
        if status := _examine(config, world, as_json=as_json):
            sys.exit(status)  # without a word to the other ranks, which may be in the middle of a step
        return status

    return run_as_rank(config, lead)


def _examine(config: DoctorConfig, world: "World | None" = None, *, as_json: bool) -> int:
    from policy_trainer.trainer.doctor.examination import examine
    from policy_trainer.trainer.doctor.findings import Subject, Verdict, conclusion, print_findings
    from shared.models import use_threads

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also then nothing is left behind
    use_threads(config.threads)
    console = Console(stderr=as_json, highlight=False)
    with ExitStack() as stack:
        status = stack.enter_context(console.status(""))
        findings = list(print_findings(examine(Subject(config, stack, status.update, world)), console))
        status.update("end what was started")
    if as_json:
        print(json.dumps([{"check": name, **vars(finding)} for name, finding in findings], indent=2))
    console.print(conclusion(findings))
    return 1 if any(finding.verdict is Verdict.WRONG for _, finding in findings) else 0


def _plan(config: DoctorConfig, *, as_json: bool) -> int:
    """Prints what each process needs. Raises UserError for a model or a device that is not there."""
    from policy_trainer.trainer.plan import GB, Planner, load_teacher_outline
    from shared.models import load_outline

    gpu_bytes = None if config.gpu_memory_gib is None else int(config.gpu_memory_gib * 2**30)
    outline = load_outline(config.model, revision=config.revision)
    teacher = load_teacher_outline(config)
    planner = Planner(outline, gpu_bytes, ranks=config.ranks, teacher=teacher)
    needs, short = planner.needs(config), planner.shortages(config)
    if as_json:
        print(
            json.dumps({"needs": [asdict(need) for need in needs], "short": [asdict(item) for item in short]}, indent=2)
        )
        return 1 if short else 0
    whole = partial(Column, no_wrap=True)
    columns = whole("process"), whole("memory"), "needs, and what limits its speed", whole("GB", justify="right")
    table = Table(*columns, box=SIMPLE_HEAD)
    for need in needs:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in need.parts.items())
        table.add_row(need.process, need.memory, "\n".join(filter(None, (parts, need.limit))), f"{need.total / GB:.1f}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    console.print(table)
    console.print(
        "counted: prompts and completions of the greatest length; without --plan doctor measures the prompts",
        soft_wrap=True,
    )
    for shortage in short:
        console.print(f"does not fit: {shortage}", soft_wrap=True)
    return 1 if short else 0
