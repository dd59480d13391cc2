"""The command `policy-trainer eval`."""

import json

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device
from policy_trainer.config import EvalConfig


def run(arguments: list[str]) -> int:
    """Prints a table to standard error and JSON to standard output."""
    config = read_settings(EvalConfig, arguments, "eval")
    # Imported late, so that wrong options fail before PyTorch loads.
    from policy_trainer.evaluation.standalone import evaluate_with_progress, evaluation_table

    console = Console(stderr=True)
    tell_device(config.device, console)
    evaluations = evaluate_with_progress(config, console, "evaluating")
    console.print(evaluation_table(evaluations, f"{config.model} on {evaluations[0].problems} held-out problems"))
    print(json.dumps({"model": config.model, "evaluations": [item.summary() for item in evaluations]}, indent=2))
    return 0
