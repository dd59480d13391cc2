"""The commands `report` and `compare`: one run, or several, as one HTML file."""

from argparse import ArgumentParser
from pathlib import Path


def report(arguments: list[str]) -> int:
    """Prints the path of the file. Raises UserError if the directory contains no run."""
    parser = ArgumentParser(
        prog="policy-trainer report",
        description="Writes one HTML file about a run of train, sft or reward-model: summary, curves, time, "
        "settings, samples. The file loads nothing from elsewhere. The run may still be going on.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: RUN_DIR/report.html")
    options = parser.parse_args(arguments)
    # Late, so that wrong options fail before templates and settings load.
    from policy_trainer.reporting.report.report import write_report

    output = options.output or options.run_dir / "report.html"
    write_report(options.run_dir, output)
    print(output)
    return 0


def compare(arguments: list[str]) -> int:
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
    from policy_trainer.reporting.report.report import write_comparison

    write_comparison(options.run_dirs, options.output)
    print(options.output)
    return 0
