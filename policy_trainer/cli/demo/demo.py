"""The demo: a tiny model learns to add, with a reference server and a rollout worker on this machine.

With --vision the sums are in pictures; the trained model is measured with blank ones too. With --tools it learns to
call a tool that multiplies.

The next demo moves the directory of an earlier one aside, and no other directory.
"""

import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from policy_trainer.cli.demo.base_model import OnProgress, cached_base_model, make_base_model
from policy_trainer.cli.demo.demo_report import (
    MAX_KL_AT_STEP_0,
    print_summary,
    summarise,
    write_pictures,
    write_transcripts,
)
from policy_trainer.cli.demo.drawn_sums import BLANK_SUMS, DRAWN_SUMS
from policy_trainer.cli.demo.products import MULTIPLY, PRODUCTS
from policy_trainer.cli.demo.tool_model import cached_tool_model, make_tool_base_model
from policy_trainer.cli.demo.vision_model import cached_vision_model, make_vision_base_model
from policy_trainer.config import (
    INLINE,
    CheckpointConfig,
    DemoChoices,
    DemoConfig,
    DemoSetupConfig,
    EvalConfig,
    EvalEvaluationConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)
from policy_trainer.data.pictures import require_pillow
from policy_trainer.processes.fork_server import fork_server
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.reporting.report.report import write_report
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.evaluation.results import Evaluation
from policy_trainer.trainer.evaluation.standalone import evaluate_with_progress
from policy_trainer.trainer.run import train
from shared.atomic_files import write_json
from shared.errors import UserError
from shared.models import use_threads
from shared.settings import from_values

# A file that every demo writes into its directory before anything else.
MARKER = ".demo"


def rename_earlier(directory: RunDirectory, console: Console) -> None:
    """Renames an earlier demo's directory to NAME.previous, removes the one before it, and marks the new one.

    Raises UserError rather than touch what no demo has written.
    """
    run_dir, continuing = directory.root, _continuing(directory)
    if not _is_empty(run_dir):
        previous = run_dir.with_name(run_dir.name + ".previous")
        for kept in (run_dir, previous):
            _refuse_what_is_not_ours(kept)
        if continuing and not (run_dir / "summary.json").exists():
            console.print(f"{run_dir} holds an interrupted demo; `{continuing}` would have continued it")
        shutil.rmtree(previous, ignore_errors=True)
        run_dir.rename(previous)
        console.print(f"the earlier {run_dir} is now {previous}", highlight=False)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / MARKER).write_text("made by `policy-trainer demo`: the next one moves this directory aside\n")


def refuse_another_demo(directory: RunDirectory, config: DemoConfig) -> None:
    """Raises UserError if run_dir holds something else, or a demo of another seed or of pictures instead of texts: its
    reference and problems are different."""
    _refuse_what_is_not_ours(directory.root)
    continuing = _continuing(directory)
    if continuing not in (None, resume_command(config.seed, _task(config))):
        raise UserError(
            f"--resume: {directory.root} holds a demo of another --seed, --vision or --tools",
            f"continue it with: {continuing}, or start a new one without --resume",
        )


def resume_command(seed: int, task: str) -> str:
    flag = {DRAWN_SUMS: "VISION=1 ", PRODUCTS: "TOOLS=1 "}.get(task, "")
    return f"make demo {flag}{f'SEED={seed} ' if seed else ''}RESUME=1"


def _refuse_what_is_not_ours(path: Path) -> None:
    if not _is_empty(path) and not (path / MARKER).is_file():
        raise UserError(
            f"run_dir: {path} was not made by a demo, which would move it aside",
            "choose another --run-dir, or move it away yourself",
        )


def _is_empty(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _continuing(directory: RunDirectory) -> str | None:
    """The command for continuing the demo in the directory; None when there is none."""
    if not directory.config.exists():
        return None
    config = tomllib.loads(directory.config.read_text())
    return resume_command(config.get("seed", 0), config.get("task", ""))


EVAL_PROBLEMS = 512
SAMPLING = SamplingConfig(num_generations=8, prompts_per_round=16, max_completion_length=40)
# A call, its answer, and the model's.
TOOL_SAMPLING = SAMPLING.model_copy(update={"max_completion_length": 64})


def demo(config: DemoConfig, console: Console) -> int:
    """Evaluates, trains, evaluates again, and writes RUN_DIR/summary.json.

    Returns the exit status: 0, 1 when the KL check fails, 130 when interrupted.
    """
    began = time.monotonic()
    directory = RunDirectory(config.run_dir)
    if config.vision:
        require_pillow()
    if config.resume:
        refuse_another_demo(directory, config)
    else:
        rename_earlier(directory, console)
    use_threads(1)  # more threads make so small a model slower
    base = _base_model(config, console)
    console.print(f"measuring it on {EVAL_PROBLEMS} held-out problems before training", highlight=False)
    before = evaluate_with_progress(_eval_config(base, config, _task(config)), console, "before")
    recipe = _recipe(config, base, INLINE).model_copy(update={"resume": config.resume})
    with fork_server(recipe) as forks:
        result = train(recipe, console, forks=forks)
    if not result.finished:
        command = resume_command(config.seed, _task(config))
        console.print(f"stopped after {result.steps} steps; continue with: {command}", highlight=False)
        return 130
    console.print(f"measuring the trained model on the same {EVAL_PROBLEMS} problems", highlight=False)
    after = evaluate_with_progress(_eval_config(directory.model, config, _task(config)), console, "after")
    blank = _without_pictures(directory.model, config, console) if config.vision else None
    records = read_metrics(directory.metrics)
    summary = summarise(config, result, before, after, records, time.monotonic() - began, blank)
    write_json(directory.root / "summary.json", summary)
    write_report(directory.root, directory.root / "report.html")
    if config.vision:
        write_pictures(directory.root / "transcripts.html", before[0], after[0], summary)
    else:
        write_transcripts(directory.root / "transcripts.md", before[0], after[0])
    print_summary(summary, directory, console)
    return 0 if summary["kl_at_step_0"] < MAX_KL_AT_STEP_0 else 1


def set_up(config: DemoSetupConfig) -> Path:
    """Writes RUN_DIR/base, unless it exists, and RUN_DIR/config.toml, the --config of a trainer and its workers."""
    directory = RunDirectory(config.run_dir)
    if config.vision:
        require_pillow()
    directory.make()  # before the base model, which takes half a minute
    base = config.run_dir / "base"
    if not base.exists():
        use_threads(1)  # more threads make so small a model slower
        _MAKERS[_task(config)].make(base, config.seed, lambda done, total: None)
    recipe = _recipe(config, base, config.server).model_copy(update={"rollout": "external"})
    directory.write_config(recipe)
    return directory.config


class _Maker(NamedTuple):
    """Of a base model. cached: the model in this directory, made on first use."""

    has_learnt: str
    time_needed: str
    make: Callable[[Path, int, OnProgress], None]
    cached: Callable[[Path, int, OnProgress], Path]


_MAKERS = {
    "arithmetic": _Maker("sums", "half a minute", make_base_model, cached_base_model),
    DRAWN_SUMS: _Maker("to read sums in pictures", "a minute", make_vision_base_model, cached_vision_model),
    PRODUCTS: _Maker("to call a tool, and mostly to guess,", "a minute", make_tool_base_model, cached_tool_model),
}


def _base_model(config: DemoConfig, console: Console) -> Path:
    cache = config.run_dir.parent / "base_models"
    maker = _MAKERS[_task(config)]
    console.print(
        f"base model: a tiny one that has learnt {maker.has_learnt} from examples, kept in {cache}; making it takes "
        f"{maker.time_needed}",
        highlight=False,
        soft_wrap=True,
    )
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warming up the base model", total=None)
        return maker.cached(
            cache,
            config.seed,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _recipe(config: DemoChoices, base: Path, server: str) -> TrainConfig:
    """The demo's settings. With learning rates of 1e-3 and more the policy collapses."""
    return from_values(
        TrainConfig,
        model=str(base),
        seed=config.seed,
        threads=1,
        device="cpu",  # so small a model is no faster on a GPU
        task=_task(config),
        **_tools(config),
        run_dir=config.run_dir,
        server=server,
        max_steps=config.max_steps,
        groups_per_step=16,
        publish_every=4,
        loss=LossConfig(epsilon=0.2, beta=0.04, drop_zero_variance=True),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10, min_lr_rate=0.1, max_grad_norm=1.0),
        checkpoint=CheckpointConfig(save_steps=20, save_total_limit=2),
        evaluation=EvaluationConfig(eval_steps=20, problems=128, batch_size=128),
    )


def _task(config: DemoChoices) -> str:
    return DRAWN_SUMS if config.vision else PRODUCTS if config.tools else "arithmetic"


def _tools(config: DemoChoices) -> dict[str, Any]:
    """Of the settings, those that depend on --tools."""
    return {"sampling": TOOL_SAMPLING, "tools": [MULTIPLY]} if config.tools else {"sampling": SAMPLING}


def _without_pictures(model: Path, config: DemoConfig, console: Console) -> Evaluation:
    """The greedy evaluation with blank pictures."""
    console.print("measuring it once more with blank pictures, where it can only guess", highlight=False)
    return evaluate_with_progress(_eval_config(model, config, BLANK_SUMS), console, "blank")[0]


def _eval_config(model: Path, config: DemoConfig, task: str) -> EvalConfig:
    return from_values(
        EvalConfig,
        model=str(model),
        task=task,
        seed=config.seed,
        threads=1,
        device="cpu",  # so small a model is no faster on a GPU
        **_tools(config),
        evaluation=EvalEvaluationConfig(problems=EVAL_PROBLEMS, batch_size=128),
    )
