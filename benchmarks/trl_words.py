"""GRPO of a pretrained model on the word problems of examples/, by TRL's GRPOTrainer and by ours: the same script, of
which one import differs, with the same seed, model, problems, reward and completions.

    python examples/word_problems/make_problems.py
    python -m benchmarks.trl_words MODEL STEPS SEED > out.txt

Prints the seconds of `trainer.train()`, the rewards of training's first and last eighth, and the held-out accuracy of
greedy answers; then, as JSON, second and mean reward of each call of the reward function. Needs TRL.
"""

import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import measure
from policy_trainer.config import DataConfig, EvalConfig, EvalEvaluationConfig, SamplingConfig
from policy_trainer.trainer.evaluation.standalone import evaluate_model
from shared.process import child_environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "word_problems"
SYSTEM, PREFILL = "Write one equation.", "Equation:"
LIBRARIES = {"TRL": "trl", "Tandem": "policy_trainer.trl"}
GROUPS, COMPLETIONS, LENGTH, HELD_OUT = 8, 8, 16, 200


def train(library: str, model: Path, steps: int, seed: int, problems: Path, out: Path) -> list[tuple[float, float]]:
    """Leaves the model in `out`. Returns the second and the mean reward of each call of the reward function."""
    datasets: Any = import_module("datasets")
    trl: Any = import_module(library)
    sys.path.insert(0, str(EXAMPLE))
    reward: Any = import_module("reward")
    calls: list[tuple[float, float]] = []

    def right_result(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        rewards = reward.right_result([completion[0]["content"] for completion in completions], answer)
        calls.append((time.monotonic(), fmean(rewards)))
        return rewards

    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    roles = "system", "user", "assistant"
    data = [
        {
            "prompt": [
                {"role": role, "content": text}
                for role, text in zip(roles, (SYSTEM, row["prompt"], PREFILL), strict=True)
            ],
            "answer": row["answer"],
        }
        for row in rows
    ]
    settings = trl.GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, seed=seed, max_steps=steps, gradient_checkpointing=False,
        per_device_train_batch_size=GROUPS * COMPLETIONS, num_generations=COMPLETIONS, max_completion_length=LENGTH,
        learning_rate=1e-5, beta=0.0, save_strategy="no", report_to="none", logging_steps=10, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(model), reward_funcs=[right_result], args=settings, train_dataset=datasets.Dataset.from_list(data)
    )
    began = time.monotonic()
    trainer.train()
    calls.append((time.monotonic(), calls[-1][1]))
    trainer.save_model(str(out))
    return [(second - began, value) for second, value in calls]


def held_out(model: Path, problems: Path) -> float:
    config = EvalConfig(
        model=str(model),
        task="jsonl",
        data=DataConfig(
            path=problems, eval_path=problems, system_prompt=SYSTEM, assistant_prefill=PREFILL, answer_in="last_number"
        ),
        sampling=SamplingConfig(max_completion_length=LENGTH, stop=["\n"]),
        evaluation=EvalEvaluationConfig(problems=HELD_OUT),
    )
    return evaluate_model(config, lambda *_: None)[0].accuracy


def run_side(library: str, model: Path, steps: int, seed: int, problems: Path, out: Path) -> list[tuple[float, float]]:
    """`train` in a process of its own, so that neither side warms the other's caches."""
    command = [sys.executable, "-m", "benchmarks.trl_words", "--side", library, str(model), str(steps), str(seed)]
    done = subprocess.run(
        [*command, str(problems), str(out)], env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{library} failed: see above")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        library, model, steps, seed, problems, out = sys.argv[2:]
        print(json.dumps(train(library, Path(model), int(steps), int(seed), Path(problems), Path(out))))
        return
    model, steps, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rows, curves = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        lines = (EXAMPLE / "problems.jsonl").read_text().splitlines(keepends=True)
        training, others = directory / "training.jsonl", directory / "held_out.jsonl"
        training.write_text("".join(lines[:-HELD_OUT]))
        others.write_text("".join(lines[-HELD_OUT:]))
        for name, library in LIBRARIES.items():
            out = directory / name
            curves[name] = curve = run_side(library, model, steps, seed, training, out)
            rewards, part = [value for _, value in curve], max(1, len(curve) // 8)
            first, last = (fmean(eighth) for eighth in (rewards[:part], rewards[-part:]))
            rows.append([name, f"{curve[-1][0]:.0f}", f"{first:.3f}", f"{last:.3f}", f"{held_out(out, others):.3f}"])
            print(*rows[-1], sep=" | ", file=sys.stderr)
        before = held_out(model, others)
    title = f"{steps} steps of word problems, seed {seed}; held-out {before:.3f} before"
    measure.show(title, ["", "seconds", "reward, first eighth", "last eighth", "held-out"], rows)
    print(json.dumps(curves))


if __name__ == "__main__":
    main()
