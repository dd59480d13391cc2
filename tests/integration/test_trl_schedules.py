"""Runs under TRL and with the import changed: the same learning rates, updates and numbers of completions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The rewards differ within each group. Prints how many completions were judged, and the learning rate of each update.
SCRIPT = """
import json
from pathlib import Path
from datasets import Dataset
from IMPORT import GRPOConfig, GRPOTrainer

judged = []

def reward(completions, **kwargs):
    judged.extend(completions)
    return [float(place) for place in range(len(completions))]

args = GRPOConfig(
    output_dir="out", num_generations=4, max_completion_length=4, learning_rate=1e-3,
    logging_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    **{"per_device_train_batch_size": 4, **GIVEN},
)
rows = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(9)])
trainer = GRPOTrainer(model=MODEL, reward_funcs=reward, args=args, train_dataset=rows)
trainer.train()
rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
metrics = Path("out/metrics.jsonl")
if metrics.exists():
    steps = [json.loads(line) for line in metrics.read_text().splitlines() if '"kind": "step"' in line]
    rates = [update["learning_rate"] for step in steps for update in step["each_update"]]
print("DONE", json.dumps([len(judged), rates]))
"""


def ran(package: str, given: dict[str, Any], model: Path, directory: Path) -> tuple[int, list[float]]:
    directory.mkdir()
    code = SCRIPT.replace("IMPORT", package).replace("GIVEN", repr(given)).replace("MODEL", repr(str(model)))
    (directory / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DONE ")]
    judged, rates = json.loads(line.removeprefix("DONE "))
    return judged, rates


@pytest.mark.parametrize(
    ("given", "updates", "judged"),
    [
        # Two iterations on two halves of a batch of four groups; the second step stops after one of four updates.
        (
            {
                "max_steps": 5,
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "num_iterations": 2,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
            },
            5,
            32,
        ),
        # An update of two generation batches; an epoch has four, its last prompt is left out.
        pytest.param(
            {"num_train_epochs": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 4},
            2,
            32,
            marks=pytest.mark.long,
        ),
        # Updates on half a group, twice.
        (
            {"max_steps": 4, "per_device_train_batch_size": 2, "steps_per_generation": 2, "num_iterations": 2},
            4,
            4,
        ),
    ],
)
def test_updates_and_learning_rates_are_trls(
    given: dict[str, Any], updates: int, judged: int, random_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    theirs = ran("trl", given, random_model, tmp_path / "theirs")
    ours = ran("policy_trainer.trl", given, random_model, tmp_path / "ours")
    assert (theirs[0], len(theirs[1])) == (ours[0], len(ours[1])) == (judged, updates)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-9, abs=0)
