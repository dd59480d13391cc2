"""GRPO of a pretrained model on the word problems of examples/, by TRL's GRPOTrainer and by ours: the same script, of
which one import differs, with the same seed, model, problems, reward and completions.

    python examples/word_problems/make_problems.py
    python -m benchmarks.trl_words MODEL 40 0 1 2 --out words.json

Writes and prints the seconds of `trainer.train()` and the held-out accuracy of greedy answers for each seed; the file
also has second and mean reward of each call of the reward function, which a picture next to it shows. Needs TRL.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmarks import measure
from policy_trainer.config import DataConfig, EvalConfig, EvalEvaluationConfig, SamplingConfig
from policy_trainer.trainer.evaluation.results import wilson_interval
from policy_trainer.trainer.evaluation.standalone import evaluate_model
from shared.process import child_environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "word_problems"
SETTINGS = tomllib.loads((EXAMPLE / "run.toml").read_text(encoding="utf-8"))
SAMPLING = SETTINGS["sampling"]
LIBRARIES = {"TRL": "trl", "Tandem": "policy_trainer.trl"}
GROUPS, COMPLETIONS, HELD_OUT = SETTINGS["groups_per_step"], SAMPLING["num_generations"], 200


def train(library: str, model: Path, steps: int, seed: int, problems: Path, out: Path) -> dict[str, Any]:
    """Leaves the model in `out`. Returns the seconds of training, and as the curve the second and the mean reward of
    each call of the reward function."""
    datasets: Any = import_module("datasets")
    trl: Any = import_module(library)
    sys.path.insert(0, str(EXAMPLE))
    reward: Any = import_module("reward")
    calls: list[tuple[float, float]] = []

    def right_result(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = reward.right_result(completions, answer)
        calls.append((time.monotonic(), fmean(rewards)))
        return rewards

    data = [json.loads(line) for line in problems.read_text().splitlines()]
    settings = trl.GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, seed=seed, max_steps=steps, gradient_checkpointing=False,
        per_device_train_batch_size=GROUPS * COMPLETIONS, num_generations=COMPLETIONS,
        max_completion_length=SAMPLING["max_completion_length"], learning_rate=SETTINGS["optimizer"]["learning_rate"],
        beta=SETTINGS["loss"]["beta"], save_strategy="no", report_to="none", logging_steps=10, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(model), reward_funcs=[right_result], args=settings, train_dataset=datasets.Dataset.from_list(data)
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    trainer.save_model(str(out))
    return {"seconds": seconds, "curve": [(second - began, value) for second, value in calls]}


def templated(problems: Sequence[str], model: Path) -> Iterator[str]:
    """Problems whose prompts are texts as the model reads them: TRL does not continue an assistant's message."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    system, prefill = SETTINGS["data"]["system_prompt"], SETTINGS["data"]["assistant_prefill"]
    for line in problems:
        problem = json.loads(line)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": problem["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        yield json.dumps({**problem, "prompt": text + prefill}) + "\n"


def held_out(model: Path, problems: Path) -> float:
    config = EvalConfig(
        model=str(model),
        task="jsonl",
        data=DataConfig(path=problems, eval_path=problems, prompt_style="plain", answer_in="last_number"),
        sampling=SamplingConfig(max_completion_length=SAMPLING["max_completion_length"], stop=SAMPLING["stop"]),
        evaluation=EvalEvaluationConfig(problems=HELD_OUT),
    )
    return evaluate_model(config, lambda *_: None)[0].accuracy


def run_side(library: str, model: Path, steps: int, seed: int, problems: Path, out: Path) -> dict[str, Any]:
    """`train` in a process of its own, so that neither side warms the other's caches."""
    command = [sys.executable, "-m", "benchmarks.trl_words", "--side", library, str(model), str(steps), str(seed)]
    done = subprocess.run(
        [*command, str(problems), str(out)], env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{library} failed: see above")
    return json.loads(done.stdout.splitlines()[-1])


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The rewards of training over completions and over minutes: each run, a mean of five steps."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for run in runs:
        seconds, rewards = zip(*run["curve"], strict=True)
        smooth = [fmean(rewards[max(0, step - 4) : step + 1]) for step in range(len(rewards))]
        completions = [(step + 1) * GROUPS * COMPLETIONS for step in range(len(rewards))]
        colour = "C0" if run["side"] == "Tandem" else "C1"
        label = run["side"] if run["seed"] == runs[0]["seed"] else None
        panels[0].plot(completions, smooth, colour, label=label)
        panels[1].plot([each / 60 for each in seconds], smooth, colour)
    panels[0].set(xlabel="completions", ylabel="reward, mean of five steps")
    panels[1].set(xlabel="minutes")
    panels[0].legend()
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        library, model, steps, seed, problems, out = sys.argv[2:]
        print(json.dumps(train(library, Path(model), int(steps), int(seed), Path(problems), Path(out))))
        return
    parser = ArgumentParser(prog="benchmarks.trl_words", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("words.json"), help="figures; the picture goes next to them")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        lines = [*templated((EXAMPLE / "problems.jsonl").read_text().splitlines(), options.model)]
        training, others = directory / "training.jsonl", directory / "held_out.jsonl"
        training.write_text("".join(lines[:-HELD_OUT]))
        others.write_text("".join(lines[-HELD_OUT:]))
        before = held_out(options.model, others)
        for seed, (side, library) in product(options.seeds, LIBRARIES.items()):
            out = directory / "model"
            trained = run_side(library, options.model, options.steps, seed, training, out)
            runs.append({"side": side, "seed": seed, **trained, "held_out": held_out(out, others)})
            print({name: value for name, value in runs[-1].items() if name != "curve"}, file=sys.stderr)
            options.out.write_text(json.dumps({"before": before, "problems": HELD_OUT, "runs": runs}) + "\n")
            shutil.rmtree(out)
    draw(runs, options.out.with_suffix(".png"))
    rows = []
    for side in LIBRARIES:
        of_side = [run for run in runs if run["side"] == side]
        # All seeds have the same held-out problems, so that more seeds do not narrow it.
        low, high = wilson_interval(fmean(run["held_out"] for run in of_side) * HELD_OUT, HELD_OUT)
        seconds, after = (", ".join(f"{run[name]:.3g}" for run in of_side) for name in ("seconds", "held_out"))
        rows.append([side, seconds, after, f"{low:.2f} to {high:.2f}"])
    title = f"{options.steps} steps of word problems; held-out {before:.3f} before"
    measure.show(title, ["", "seconds", "held-out", "95% interval of the mean"], rows)


if __name__ == "__main__":
    main()
