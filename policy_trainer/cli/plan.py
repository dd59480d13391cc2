"""The command `policy-trainer plan`."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import PlanConfig

COLUMNS = 120
# docs/memory.md has the measurement.
UNCOUNTED = (
    "0.4 GB of Python and PyTorch, and up to 0.5 GB of freed memory that the process keeps for its next step; a "
    "smaller --micro-batch-tokens lowers the latter"
)


def run(arguments: list[str]) -> int:
    """Returns 1 where something does not fit. Raises UserError for a model or a device that is not there."""
    config = read_settings(PlanConfig, arguments, "plan")
    # Late, so that wrong options fail before PyTorch loads.
    from policy_trainer.trainer.machine import MAIN_MEMORY
    from policy_trainer.trainer.plan import load_teacher_outline, plan
    from policy_trainer.trainer.shortages import GB, shortages
    from shared.models import load_outline

    gpu_bytes = None if config.gpu_memory_gib is None else int(config.gpu_memory_gib * 2**30)
    outline = load_outline(config.model, revision=config.revision)
    needs = plan(config, outline, gpu_bytes, config.ranks, load_teacher_outline(config))
    table = Table("process", "memory", "needs", Column("GB", justify="right"), "what limits its speed", box=SIMPLE_HEAD)
    for need in needs:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in need.parts.items())
        table.add_row(need.process, need.memory, parts, f"{need.total / GB:.1f}", need.limit)
    console = Console(width=COLUMNS, highlight=False)
    console.print(table)
    if any(need.memory == MAIN_MEMORY and need.limit for need in needs):
        console.print(f"not counted, for each process on a CPU: {UNCOUNTED}", soft_wrap=True)
    short = shortages(config, needs, gpu_bytes)
    for shortage in short:
        console.print(f"does not fit: {shortage}", soft_wrap=True)
    return 1 if short else 0
