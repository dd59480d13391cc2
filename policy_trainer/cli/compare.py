"""The command `policy-trainer compare`: compares runs in one HTML file."""

from argparse import ArgumentParser
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Prints the path of the file. Raises UserError if a directory contains no run."""
    parser = ArgumentParser(
        prog="policy-trainer compare",
        description="Writes one HTML file that compares runs: their curves by step and by completions, latest "
        "metrics, and the settings that differ.",
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directories of two or more runs")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("compare.html"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    # Late, so that wrong options fail before templates and settings load.
    from policy_trainer.report.report import write_comparison

    write_comparison(options.run_dirs, options.output)
    print(options.output)
    return 0
