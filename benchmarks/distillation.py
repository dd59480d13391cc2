"""Distillation into a smaller model on its own samples, compared with SFT on as many samples of the teacher.

`python -m benchmarks.distillation` prints accuracy against samples and seconds. Both sides train by a user's commands.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import measure
from benchmarks.base_models import cached_student, cached_teacher
from benchmarks.processes import run_policy_trainer
from policy_trainer.config import EvalConfig, PromptConfig
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from policy_trainer.trainer.evaluation.standalone import evaluate_model
from shared.models import load_model, load_tokenizer, use_threads
from shared.settings import from_values

# Problems of a step, samples of each, their longest length, held-out problems.
GROUPS, COMPLETIONS, LENGTH, PROBLEMS = 16, 4, 40, 256
# Learning rates of the two commands.
RATES = {"train": "3e-4", "sft": "2e-3"}
Row = tuple[str, int, float, float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path, default=Path("runs/base_models"))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    use_threads(1)
    teacher, student = cached_teacher(arguments.cache), cached_student(arguments.cache)
    rows = [("teacher", 0, 0.0, _accuracy(teacher)), ("student", 0, 0.0, _accuracy(student))]
    with TemporaryDirectory() as directory:
        rows += _distilled(student, teacher, arguments.steps, Path(directory) / "distilled")
        for steps in (arguments.steps // 3, arguments.steps):
            rows.append(_imitated(student, teacher, steps * GROUPS * COMPLETIONS, Path(directory) / f"sft-{steps}"))
    cells = [[name, f"{samples:,}", f"{seconds:.0f}", f"{accuracy:.2f}"] for name, samples, seconds, accuracy in rows]
    measure.show("", ["", "samples", "seconds", "greedy accuracy"], cells)


def _distilled(student: Path, teacher: Path, steps: int, run_dir: Path) -> list[Row]:
    """Seconds: of the training loop, evaluations left out."""
    options = {
        "preset": "distill", "model": student, "teacher": teacher, "run-dir": run_dir, "threads": 1, "device": "cpu",
        "task": "arithmetic", "groups-per-step": GROUPS, "sampling.num-generations": COMPLETIONS, "max-steps": steps,
        "sampling.prompts-per-round": GROUPS, "sampling.max-completion-length": LENGTH, "max-lag": 1,
        "optimizer.learning-rate": RATES["train"], "evaluation.eval-steps": max(1, steps // 3),
        "evaluation.problems": PROBLEMS, "checkpoint.save-steps": steps,
    }  # fmt: skip
    _command("train", options)
    rows, seconds = [], 0.0
    for record in read_metrics(run_dir / "metrics.jsonl"):
        if record["kind"] == "step":
            seconds += record["training_seconds"] + record["waiting_seconds"]
        elif record["kind"] == "evaluation" and record["step"]:
            rows.append(("distilled", record["step"] * GROUPS * COMPLETIONS, seconds, record["accuracy"]))
    return rows


def _imitated(student: Path, teacher: Path, samples: int, run_dir: Path) -> Row:
    """Seconds: the teacher's sampling and the whole command."""
    began = time.monotonic()
    file = run_dir.with_suffix(".jsonl")
    tokenizer = load_tokenizer(str(teacher))
    sampler = HFSampler(load_model(str(teacher), revision=None, device="cpu", dtype="float32"), tokenizer)
    encoder = PromptEncoder(tokenizer, PromptConfig())
    with file.open("w") as lines:
        for first in range(0, samples, GROUPS * COMPLETIONS):
            problems = [Arithmetic(0).problem(index) for index in range(first, first + GROUPS * COMPLETIONS)]
            prompts = [encoder.encode(problem) for problem in problems]
            sampled = sample(sampler, prompts, SamplingParams(1, LENGTH, temperature=1), seed=first)
            for problem, (completion,) in zip(problems, sampled, strict=True):
                ids = completion.ids.tolist()
                text = tokenizer.decode(ids[:-1] if completion.eos else ids)
                lines.write(json.dumps({"messages": list(problem.messages), "completion": text}) + "\n")
    options = {
        "model": student, "run-dir": run_dir, "data.path": file, "data.eval-path": file, "threads": 1, "device": "cpu",
        "eval-steps": 0, "optimizer.learning-rate": RATES["sft"],
    }  # fmt: skip
    _command("sft", options)
    seconds = time.monotonic() - began
    return "SFT on the teacher's samples", samples, seconds, _accuracy(run_dir / "model")


def _command(name: str, options: dict[str, object]) -> None:
    run_policy_trainer(name, *(word for option, value in options.items() for word in (f"--{option}", str(value))))


def _accuracy(model: Path) -> float:
    sections = {"sampling": {"max_completion_length": LENGTH}, "evaluation": {"problems": PROBLEMS, "batch_size": 128}}
    config = from_values(EvalConfig, model=str(model), threads=1, device="cpu", **sections)
    return evaluate_model(config, lambda *progress: None)[0].accuracy


if __name__ == "__main__":
    main()
