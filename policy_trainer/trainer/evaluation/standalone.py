"""Evaluation of a saved model, outside of a run: accuracy on held-out problems, greedy and sampled."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from policy_trainer.config import EvalConfig, TrainConfig
from policy_trainer.data.rendering import load_prompt_tokenizer
from policy_trainer.data.tasks.compatibility import check_compatibility
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.reporting.evaluating import EvaluationLines, EvaluationProgress
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rewards.registry import NOTHING
from policy_trainer.rollout.environments.rollouts import open_sessions
from policy_trainer.rollout.sampling.engines import load_sampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sampling_params
from policy_trainer.trainer.evaluation.evaluator import make_evaluator
from policy_trainer.trainer.evaluation.results import Evaluation
from shared.errors import UserError
from shared.models import load_outline, use_threads

log = structlog.get_logger()


def evaluate_model(
    config: EvalConfig | TrainConfig,
    on_progress: Callable[[str, EvaluationProgress], None],
    decodings: Mapping[str, SamplingParams] | None = None,
) -> list[Evaluation]:
    """One evaluation for each decoding, by name. Default: greedily, then sampled at sampling.temperature with
    evaluation.num_generations answers to a problem.

    on_progress: called with the decoding, again and again. Raises UserError for data or rewards that cannot be used;
    data of the wrong form is found before the model is loaded.
    """
    answers, temperature = config.evaluation.num_generations, config.sampling.temperature
    decodings = decodings or {
        "greedy": sampling_params(config.sampling, num_generations=1, temperature=0.0),
        "sampled": sampling_params(config.sampling, num_generations=answers, temperature=temperature),
    }
    use_threads(config.threads)
    task = make_task(config)
    tokenizer = load_prompt_tokenizer(config.model, config.data, revision=config.revision)
    judge = RewardScorer(tokenizer, task, config)
    outline = load_outline(config.model, revision=config.revision)
    for remark in check_compatibility(config, task, tokenizer, outline, held_out=True):
        log.warning(str(remark))
    with ExitStack() as stack:
        sessions = open_sessions(config, judge, stack)
        sampler, model = load_sampler(config, tokenizer, _give_up)
        evaluator = make_evaluator(config, task, judge, model, sessions, batch_size=config.evaluation.batch_size)
        return [
            evaluator.evaluate(
                sampler,
                params,
                config.evaluation.problems or None,
                seed=config.seed,
                on_progress=partial(on_progress, decoding),
            )
            for decoding, params in decodings.items()
        ]


def _give_up(reason: str, seconds: float) -> None:
    raise UserError(f"vllm_url: the evaluation would wait for {reason}")


def evaluate_with_progress(config: EvalConfig, console: Console, label: str) -> list[Evaluation]:
    """Shows bars on a terminal, else a line now and then if it takes long."""
    if not console.is_terminal:
        evaluating: dict[str, EvaluationLines] = {}

        def show(decoding: str, progress: EvaluationProgress) -> None:
            if line := evaluating.setdefault(decoding, EvaluationLines()).line(progress):
                console.print(f"{label}, {decoding}: {line}", highlight=False, markup=False, soft_wrap=True)

        return evaluate_model(config, show)
    with Progress(console=console, transient=True) as bars:
        tasks = {name: bars.add_task(f"{label}, {name}", total=None) for name in ("greedy", "sampled")}
        return evaluate_model(
            config, lambda name, progress: bars.update(tasks[name], completed=progress.done, total=progress.total)
        )


def evaluation_table(evaluations: list[Evaluation], title: str) -> Table:
    """Accuracy, where problems have answers, and every other reward; the total too where it is a sum of several.

    A row is a figure, so that many rewards with long names fit into 80 columns.
    """
    columns = [_figures(item) for item in evaluations]
    table = Table("", *(item.decoding for item in evaluations), title=title)
    for name in max(columns, key=len):  # that of several answers has one figure more
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _figures(item: Evaluation) -> dict[str, str]:
    accuracy = {"accuracy": f"{item.accuracy:.3f}", "95% interval": f"{item.low:.3f} to {item.high:.3f}"}
    if item.num_generations > 1:
        accuracy[f"pass@{item.num_generations}"] = f"{item.pass_at_n:.3f}"
    total = {"reward": _figure(item.reward)} if len(item.rewards) > 1 else {}
    return {
        **(accuracy if item.has_accuracy else {}),
        **{name: _figure(value) for name, value in item.rewards.items() if name not in ("accuracy", NOTHING)},
        **total,
        "tokens": f"{item.mean_tokens:.1f}",
        "finished": f"{item.finished:.3f}",
    }


def _figure(value: float) -> str:
    """A dash where no answer could be judged."""
    return "-" if math.isnan(value) else f"{value:.3f}"
