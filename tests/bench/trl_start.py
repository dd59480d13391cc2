"""Seconds from Enter to the first step, and of a whole script of ten steps: TRL's quickstart, and the same with `GRPO`.

The model is the demo's; a step has the shape of TRL's defaults, one prompt with eight completions, of at most 40
tokens. Each script is a process of its own, started in turns; figures are medians. Run it with `make bench-trl`.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

from policy_trainer.demo.base_model import cached_base_model
from tests.bench import measure

ROUNDS = 5
STEPS = 10
BETAS = (0.0, 0.04)
_BASE_MODELS = Path("runs/base_models")
_COMMON = """
import json, sys, time

model, directory, beta = sys.argv[1], sys.argv[2], float(sys.argv[3])
problems = [{"prompt": [{"role": "user", "content": f"What is {i} + {i + 7}?"}]} for i in range(100)]
ends = []


def unique_characters(completions, **columns):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


"""
_TRL = """
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        ends.append(time.time())


trainer = GRPOTrainer(
    model=model,
    reward_funcs=unique_characters,
    train_dataset=Dataset.from_list(problems),
    args=GRPOConfig(
        output_dir=directory, max_steps=STEPS, max_completion_length=40, beta=beta,
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    ),
    callbacks=[Clock()],
)
trainer.train()
print(json.dumps(ends))
"""
_TANDEM = """
from policy_trainer import GRPO

GRPO(
    model=model,
    dataset=problems,
    rewards=unique_characters,
    run_dir=directory,
    max_steps=STEPS,
    preset="trl",
    sampling={"max_completion_length": 40},
    loss={"beta": beta},
    evaluation={"problems": 1, "eval_steps": 0},
    on_step=lambda metrics: ends.append(time.time()),
).train()
print(json.dumps(ends))
"""
_SCRIPTS = {"TRL": _TRL, "Tandem": _TANDEM}


def seconds(side: str, base: Path, beta: float) -> tuple[float, float]:
    """Of a script: to the end of its first step, and to its own."""
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "script.py"  # without a __main__ guard
        script.write_text(_COMMON + _SCRIPTS[side].replace("STEPS", str(STEPS)))
        command = [sys.executable, str(script), str(base.resolve()), f"{temporary}/run", str(beta)]
        began = time.time()
        result = subprocess.run(command, capture_output=True, text=True, cwd=temporary)
        end = time.time()
    if result.returncode:
        raise SystemExit(result.stderr)
    steps = json.loads(result.stdout.splitlines()[-1])
    assert len(steps) == STEPS
    return steps[0] - began, end - began


def main() -> None:
    base = cached_base_model(_BASE_MODELS, 0, lambda *_: None)
    taken: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for number in range(ROUNDS + 1):
        for side, beta in product(_SCRIPTS, BETAS):
            figures = seconds(side, base, beta)
            if number:  # the first round fills the system's cache of files
                taken.setdefault((side, beta), []).append(figures)
    rows = []
    for beta in BETAS:
        first, whole = ([median(each[k] for each in taken[side, beta]) for side in _SCRIPTS] for k in (0, 1))
        rows.append([f"{beta:g}", *(f"{t:.1f}" for t in first), f"{first[1] / first[0]:.2f}",
                     *(f"{t:.1f}" for t in whole), f"{whole[1] / whole[0]:.2f}"])  # fmt: skip
    columns = [f"{what}, {side}" for what in ("first step", f"{STEPS} steps") for side in (*_SCRIPTS, "ratio")]
    measure.show(f"seconds from Enter, median of {ROUNDS}", ["beta", *columns], rows)


if __name__ == "__main__":
    main()
