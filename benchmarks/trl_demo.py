"""160 steps of the demo's task with TRL's GRPOTrainer and with ours, one after the other: same base model, problems,
rewards and settings. Both are measured on held-out problems only before and after.

TRL is one process with two threads; ours are three processes with one thread each, which write checkpoints. Run it with
`make bench-trl`.
"""

import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.processes import run_policy_trainer
from policy_trainer.cli.demo.base_model import cached_base_model
from policy_trainer.cli.demo.demo import SAMPLING
from policy_trainer.config import EvalConfig, EvalEvaluationConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.rewards import Sample, accuracy, equal_text
from policy_trainer.rewards.answers import tags_reward
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.evaluation.standalone import evaluate_model

STEPS = 160
SEED = 0
_BASE_MODELS = Path("runs/base_models")


def train_with_trl(base: Path, directory: Path) -> float:
    """Trains as the demo does; leaves the model in `directory` and returns the seconds of training."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Imported by name: they are installed only for this benchmark, which the type checker must not depend on.
    datasets: Any = import_module("datasets")
    trl: Any = import_module("trl")
    torch.set_num_threads(2)
    task = Arithmetic(SEED)
    right = accuracy(equal_text)
    problems = [task.problem(i) for i in range(STEPS * 16)]
    data = datasets.Dataset.from_list(
        [{"prompt": [dict(m) for m in problem.messages], "answer": problem.answer} for problem in problems]
    )

    def texts(completions: list[Any]) -> list[str]:
        return [completion[0]["content"] for completion in completions]

    def accuracy_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [right(text, gold) for text, gold in zip(texts(completions), answer, strict=True)]

    def format_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [tags_reward(Sample(Problem(gold), text)) for text, gold in zip(texts(completions), answer, strict=True)]

    settings = trl.GRPOConfig(
        output_dir=str(directory), use_cpu=True, bf16=False, seed=SEED, max_steps=STEPS, gradient_checkpointing=False,
        per_device_train_batch_size=128, num_generations=8, max_completion_length=40, temperature=1.0,
        learning_rate=3e-4, warmup_steps=10, lr_scheduler_type="linear", max_grad_norm=1.0,
        beta=0.04, epsilon=0.2, loss_type="grpo", shuffle_dataset=False, save_strategy="no", report_to="none",
        logging_steps=20, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        processing_class=AutoTokenizer.from_pretrained(base),
        reward_funcs=[accuracy_reward, format_reward],
        args=settings,
        train_dataset=data,
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    trainer.save_model(str(directory))
    return seconds


def train_with_tandem(base: Path, directory: Path) -> float:
    """Trains with the demo's settings and without its evaluations; leaves the model in `directory`/model and returns
    the seconds of training."""
    demo, run = directory / "demo", RunDirectory(directory / "run")
    demo.mkdir()
    (demo / "base").symlink_to(base.resolve())
    run_policy_trainer("demo-setup", "--seed", str(SEED), "--run-dir", str(demo))
    run_policy_trainer(
        "train", "--config", str(demo / "config.toml"), "--run-dir", str(run.root), "--server", "inline",
        "--rollout", "inline", "--max-steps", str(STEPS), "--evaluation.eval-steps", "0",
    )  # fmt: skip
    run.model.rename(directory / "model")
    newest = max(run.checkpoints.iterdir())
    return json.loads((newest / "trainer.json").read_text())["training_seconds"]


def eval_accuracy(model: Path) -> float:
    config = EvalConfig(
        model=str(model), sampling=SAMPLING, evaluation=EvalEvaluationConfig(problems=512, batch_size=128)
    )
    return evaluate_model(config, lambda *_: None)[0].accuracy


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:  # a process of its own, so that neither side warms the other's caches
        base, directory = map(Path, sys.argv[2:])
        print(json.dumps({"seconds": train_with_trl(base, directory)}))
        return
    base = cached_base_model(_BASE_MODELS, SEED, lambda *_: None)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        trl_command = [sys.executable, "-m", "benchmarks.trl_demo", "--trl", str(base), str(directory / "trl")]
        output = subprocess.run(trl_command, check=True, capture_output=True, text=True).stdout
        trl_seconds = json.loads(output.splitlines()[-1])["seconds"]
        seconds = train_with_tandem(base, directory)
        rows = [
            ["TRL GRPOTrainer", f"{trl_seconds:.1f}", f"{eval_accuracy(directory / 'trl'):.3f}"],
            ["Tandem", f"{seconds:.1f}", f"{eval_accuracy(directory / 'model'):.3f}"],
        ]
        title = f"{STEPS} steps of the demo, from {eval_accuracy(base):.3f}; ratio {trl_seconds / seconds:.2f}"
        measure.show(title, ["", "seconds", "accuracy"], rows)


if __name__ == "__main__":
    main()
