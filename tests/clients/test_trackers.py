"""MLflow, trackio and Weights & Biases themselves, without a network: what they show of a run that was resumed.

`make test-clients` installs them next to our packages.
"""

import json
import subprocess
from pathlib import Path

import pytest

from shared.process import child_environment

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="the trackers are not installed: make test-clients")
def test_a_resumed_run_is_one_run_with_every_number(tmp_path: Path) -> None:
    script = [str(PYTHON), "-m", "tests.clients.trackers_script"]
    done = subprocess.run(
        script, cwd=tmp_path, env={**child_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    first, again = [[step, float(step)] for step in range(1, 7)], [5, 9.0]
    assert seen["mlflow"] == {
        "kl": sorted([*first, again]),
        "names": ["train/kl", "train/reward/über_"],
        "beta": "0.04",
        "statuses": ["FAILED", "FINISHED"],
        "name": "a run",
        "samples": seen["mlflow"]["samples"],
    }
    assert "6*7=?" in seen["mlflow"]["samples"] and "41" in seen["mlflow"]["samples"]
    assert sorted(seen["trackio"]["kl"]) == sorted([*first, again])
    assert len(seen["wandb"]["runs"]) == 1 and seen["wandb"]["parts"] == 2
