"""Seconds from Enter to the first rewards, and of a whole script of ten steps: TRL's quickstart, the same with one line
changed, and the same with `GRPO`; with one thread and with two.

The model is the demo's; a step has the shape of TRL's defaults, one prompt with eight completions, of at most 40
tokens. Each script is a process of its own, started in turns; figures are medians. Run it with `make bench-trl`, on a
machine that is otherwise idle.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks import measure
from policy_trainer.cli.demo.base_model import cached_base_model

ROUNDS = 3
STEPS = 10
BETAS = (0.0, 0.04)
THREADS = (1, 2)
_BASE_MODELS = Path("runs/base_models")
_COMMON = """
import json, sys, time

model, directory, beta = sys.argv[1], sys.argv[2], float(sys.argv[3])
problems = [{"prompt": [{"role": "user", "content": f"What is {i} + {i + 7}?"}]} for i in range(100)]
calls = []


def unique_characters(completions, **columns):
    calls.append(time.time())
    return [float(len(set(completion[0]["content"]))) for completion in completions]


"""
_TRL = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model=model,
    reward_funcs=unique_characters,
    train_dataset=Dataset.from_list(problems),
    args=GRPOConfig(
        output_dir=directory, max_steps=STEPS, max_completion_length=40, beta=beta,
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    ),
)
trainer.train()
print(json.dumps(calls))
"""
_GRPO = """
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
    evaluation={"problems": 0, "eval_steps": 0},
).train()
print(json.dumps(calls))
"""
_SCRIPTS = {"TRL": _TRL, "policy_trainer.trl": _TRL.replace("from trl ", "from policy_trainer.trl "), "GRPO": _GRPO}


def seconds(side: str, base: Path, beta: float, threads: int) -> tuple[float, float]:
    """Of a script: to its first rewards, and to its end."""
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "script.py"  # without a __main__ guard
        script.write_text(_COMMON + _SCRIPTS[side].replace("STEPS", str(STEPS)))
        command = [sys.executable, str(script), str(base.resolve()), f"{temporary}/run", str(beta)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        began = time.time()
        result = subprocess.run(command, capture_output=True, text=True, cwd=temporary, env=environment)
        end = time.time()
    if result.returncode:
        raise SystemExit(result.stderr)
    calls = json.loads(result.stdout.splitlines()[-1])
    assert len(calls) >= STEPS
    return calls[0] - began, end - began


def main() -> None:
    base = cached_base_model(_BASE_MODELS, 0, lambda *_: None)
    taken: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for number in range(ROUNDS + 1):
        for beta, threads, side in product(BETAS, THREADS, _SCRIPTS):
            figures = seconds(side, base, beta, threads)
            if number:  # the first round fills the system's cache of files
                taken.setdefault((side, beta, threads), []).append(figures)
    rows = []
    for side, beta, threads in product(_SCRIPTS, BETAS, THREADS):
        row = [side, f"{beta:g}", str(threads)]
        for k in (0, 1):
            ours, theirs = (median(each[k] for each in taken[name, beta, threads]) for name in (side, "TRL"))
            row += [f"{ours:.1f}", f"{ours / theirs:.2f}"]
        rows.append(row)
    columns = ["script", "beta", "threads", "first rewards", "/ TRL", f"{STEPS} steps", "/ TRL"]
    measure.show(f"seconds from Enter, median of {ROUNDS}", columns, rows)


if __name__ == "__main__":
    main()
