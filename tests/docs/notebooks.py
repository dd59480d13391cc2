"""The notebooks of examples/, run in a kernel one after the other: `make docs-test`."""

import ast
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def run(name: str, place: Path) -> list[str]:
    """What each cell shows as its value."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"]


def test_a_model_learns_and_its_run_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    evaluations, answer = run("quickstart", tmp_path)
    (_, before), *_, (_, after) = ast.literal_eval(evaluations)
    assert before < 1.4 and after > 1.7
    assert "<answer>" in answer
    steps, rewards, seconds = run("look_at_a_run", tmp_path)
    assert "frac_reward_zero_std" in steps and "reward" in rewards and "training_seconds" in seconds
    assert (tmp_path / "runs/quickstart/report.html").is_file() and (tmp_path / "my-model/README.md").is_file()
