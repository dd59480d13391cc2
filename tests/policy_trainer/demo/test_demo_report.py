"""What a demo prints when it has ended."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from policy_trainer.demo.demo_report import print_summary
from policy_trainer.run_files.run_directory import RunDirectory


def test_it_says_how_to_open_the_dashboard_and_make_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's server has ended, and what `make` installed need not be on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    measures = ("accuracy", "sampled_accuracy", "format")
    summary = {f"{name}_{when}": 1.0 for name in measures for when in ("before", "after")}
    summary |= {"steps": 60, "seconds": 30.0, "seconds_total": 60.0, "kl_at_step_0": 0.0}
    output = StringIO()
    print_summary(
        {**summary, "seconds_by_stage": {"training": 1.0}}, RunDirectory(Path("runs/my demo")), Console(file=output)
    )
    assert output.getvalue().endswith(
        "its dashboard: .venv/bin/ref-server serve --model 'runs/my demo/model' --data-dir 'runs/my demo/server'\n"
        "  and open http://127.0.0.1:8400/#/runs\n"
        "its report, as one HTML file: .venv/bin/policy-trainer report 'runs/my demo'\n"
    )
