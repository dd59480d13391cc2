"""The command `policy-trainer eval`."""

import json
import sys
from itertools import islice

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device
from policy_trainer.config import EvalConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.sample_views import view
from policy_trainer.reporting.samples import as_json

# Problems that a `--samples` without a number shows.
_SAMPLES = 5


def run(arguments: list[str]) -> int:
    """Prints a table to standard error, and JSON to standard output unless that is a terminal.

    Raises RunFailed, once all is printed, when a reward failed on every completion.
    """
    config = read_settings(EvalConfig, _with_number_of_samples(arguments), "eval")
    # Imported late, so that wrong options fail before PyTorch loads.
    from policy_trainer.trainer.evaluation.results import sampled_groups
    from policy_trainer.trainer.evaluation.standalone import evaluate_with_progress, evaluation_table

    console = Console(stderr=True)
    tell_device(config.device, console)
    evaluations = evaluate_with_progress(config, console, "evaluating")
    console.print(evaluation_table(evaluations, f"{config.model} on {evaluations[0].problems} held-out problems"))
    results = []
    for item in evaluations:
        samples = list(islice(sampled_groups(item, None), config.samples))
        results.append({**item.summary(), **({"samples": [as_json(group) for group in samples]} if samples else {})})
        if samples:
            console.rule(item.decoding, align="left")
        for group in samples:
            console.print(view(group, console))
    if not sys.stdout.isatty():  # people have read the table
        print(json.dumps({"model": config.model, "evaluations": results}, indent=2))
    if failed := [name for name in evaluations[0].failed if all(name in item.failed for item in evaluations)]:
        raise RunFailed(
            f"rewards: {', '.join(failed)} failed on every completion; the warning above says why",
            "fix what it says, or name other --rewards",
        )
    return 0


def _with_number_of_samples(arguments: list[str]) -> list[str]:
    """The arguments, with a number after a `--samples` that has none."""
    given = [*arguments]
    for i, argument in enumerate(arguments):
        if argument == "--samples" and (i + 1 == len(arguments) or arguments[i + 1].startswith("-")):
            given[i] = f"--samples={_SAMPLES}"
    return given
