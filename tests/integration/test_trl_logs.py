"""The log of one script, under TRL and with the import changed: its names, its steps, its units."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config.names import TRL_METRICS

SCRIPT = """
import json
from datasets import Dataset
from transformers import TrainerCallback
from IMPORT import GRPOConfig, GRPOTrainer

rows = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(12)])

class Recorder(TrainerCallback):
    seen = []

    def on_step_end(self, args, state, control, **others):
        names = ("epoch", "max_steps", "num_train_epochs", "logging_steps", "save_steps", "eval_steps",
                 "train_batch_size")
        self.seen.append(["step", state.global_step, *(getattr(state, name) for name in names)])

    def on_log(self, args, state, control, logs=None, **others):
        self.seen.append(["log", state.global_step, sorted(logs)])

    def on_evaluate(self, args, state, control, metrics=None, **others):
        self.seen.append(["evaluate", state.global_step, sorted(metrics)])

def letters(completions, log_metric, **columns):
    log_metric("lengths", float(len(completions)))
    return [float(len(set(text))) for text in completions]

args = GRPOConfig(
    output_dir="out", num_generations=4, per_device_train_batch_size=4, per_device_eval_batch_size=4,
    max_completion_length=8, learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True, bf16=False,
    report_to="none", eval_strategy="steps", eval_steps=2, **{"logging_steps": 1, **MORE},
)
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=letters, args=args, train_dataset=rows, eval_dataset=HELD_OUT,
    callbacks=[Recorder],
)
output = trainer.train()
print("LOGS", json.dumps([sorted(output.metrics), trainer.state.log_history, Recorder.seen]))
"""
# Measured, or drawn by another random generator.
_SECONDS = ("step_time", "runtime", "per_second")
# Datasets to evaluate on.
_SINGLE = "rows.select(range(2))"
_SEVERAL = "{'one': rows.select(range(2)), 'two': rows.select(range(2, 3))}"
_OF_DATASET = re.compile("eval_((one|two)_)?")
# An evaluation computes no log-probs after sampling.
_NOT_OF_EVALUATIONS = re.compile(rf"{_OF_DATASET.pattern}(kl|entropy)")


def run(package: str, model: Path, directory: Path, more: dict[str, Any], held_out: str) -> Any:
    directory.mkdir()
    code = SCRIPT.replace("IMPORT", package).replace("MODEL", repr(str(model))).replace("MORE", repr(more))
    code = code.replace("HELD_OUT", held_out)
    (directory / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    return json.loads(line.removeprefix("LOGS "))


def names_of(names: Iterable[str]) -> set[str]:
    return {name for name in names if not _NOT_OF_EVALUATIONS.fullmatch(name)}


def of_dataset(ours: Iterable[str], theirs: Iterable[str]) -> set[str]:
    """Names with a dataset's prefix that TRL's entry lacks: TRL names these metrics without the dataset."""
    return {name for name in ours if _OF_DATASET.sub("eval_", name) in theirs and name not in theirs}


@pytest.mark.parametrize(
    ("more", "held_out"),
    [
        ({"max_steps": 4, "num_iterations": 2}, _SEVERAL),
        pytest.param({"max_steps": 4, "entropy_coef": 0.01, "logging_steps": 3}, _SINGLE, marks=pytest.mark.long),
        pytest.param(
            {"num_train_epochs": 1, "beta": 0.04, "gradient_accumulation_steps": 2}, _SINGLE, marks=pytest.mark.long
        ),
    ],
    ids=["iterations, two datasets", "an entropy bonus", "an epoch"],
)
def test_the_log_is_that_of_trl(more: dict[str, Any], held_out: str, random_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    theirs, ours = (run(name, random_model, tmp_path / name, more, held_out) for name in ("trl", "policy_trainer.trl"))
    # After an evaluation TRL's summary lacks what has not been logged since the last log; here it has that always.
    assert {*theirs[0]} <= {*ours[0]}
    # The loss of an evaluation with a KL penalty or an entropy bonus needs log-probs, too.
    unknown = {"eval_loss"} if more.keys() & {"beta", "entropy_coef"} else set()
    for before, after in zip(theirs[1], ours[1], strict=True):
        if "train_loss" in before:
            assert {*before} <= {*after}
        else:
            assert names_of(before) - unknown == names_of(after) - of_dataset(after, before)
        for name in {"step", "epoch", "learning_rate", "lengths", "entropy_coef"} & before.keys():
            assert after[name] == pytest.approx(before[name]), name
        for name in after:
            if name.rpartition("_")[2] == "length" or name.endswith("clipped_ratio"):
                assert 0 <= after[name] <= 8
            if name.endswith(_SECONDS):
                assert after[name] > 0
        for name in {"entropy", "num_tokens", "eval_num_tokens"} & before.keys():
            assert after[name] == pytest.approx(before[name], rel=0.4), name
    assert [entry[:2] for entry in ours[2]] == [entry[:2] for entry in theirs[2]], "the events, and their steps"
    for before, after in zip(theirs[2], ours[2], strict=True):
        if before[0] == "step":
            assert after == pytest.approx(before)
        elif "train_loss" not in before[2]:
            assert {*after[2]} - of_dataset(after[2], before[2]) == names_of(before[2]) - unknown
    logged = {_OF_DATASET.sub("", name) for entry in theirs[1] for name in entry} - {"step", "lengths"}
    table = {name.replace("NAME", "letters") for name in TRL_METRICS} | {"runtime"}
    table |= {"samples_per_second", "steps_per_second"}
    assert logged <= table, "the page lists every name"
