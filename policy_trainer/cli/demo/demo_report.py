"""Writes what a demo leaves in addition to its run's files: a summary, transcripts, and a table on the terminal."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from policy_trainer.config import DemoConfig
from policy_trainer.data.pictures import data_url
from policy_trainer.reporting.metrics import scoring_seconds
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript
from policy_trainer.trainer.run import TrainResult

TRANSCRIPTS = 20
_WHEN = ("before", "after")
# Policy and reference are the same model at step 0, so that their KL is 0 but for float32 rounding.
MAX_KL_AT_STEP_0 = 1e-9


def summarise(
    config: DemoConfig,
    result: TrainResult,
    before: Sequence[Evaluation],
    after: Sequence[Evaluation],
    records: Sequence[dict[str, Any]],
    seconds_total: float,
    blank: Evaluation | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    seconds: of the training loop only. seconds_by_stage: working time of each process, without waiting. blank: the
    trained model's, on blank pictures; accuracy_of_guessing is that of the most frequent answer to every problem.
    """
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "seed": config.seed,
        "accuracy_before": before[0].accuracy,
        "accuracy_after": after[0].accuracy,
        **{
            f"{name}_{when}": value
            for when, run in zip(_WHEN, (before, after), strict=True)
            for name, value in _manner(run[0])
        },
        "sampled_accuracy_before": before[1].accuracy,
        "sampled_accuracy_after": after[1].accuracy,
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "seconds_total": round(seconds_total, 2),
        "seconds_by_stage": {
            "rollout": round(sum(record["sampling_seconds"] for record in steps), 2),
            "scoring": round(
                scoring_seconds([0.0, *(record.get("server_scoring_seconds") or 0.0 for record in steps)]), 2
            ),
            "training": round(sum(record["training_seconds"] for record in steps), 2),
        },
        "kl_at_step_0": next(record["kl_at_step_0"] for record in steps if "kl_at_step_0" in record),
        **_on_blank_pictures(blank),
        "evaluations": {
            "before": [evaluation.summary() for evaluation in before],
            "after": [evaluation.summary() for evaluation in after],
        },
        "result": asdict(result),
    }


def _manner(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """How the model answered: the format's reward, and with tools the share of answers for which it called one."""
    if "tags" in evaluation.rewards:
        yield "format", evaluation.rewards["tags"]
    if any(item.turns for item in evaluation.transcripts):
        yield "calls", sum(len(item.turns) > 1 for item in evaluation.transcripts) / len(evaluation.transcripts)


def _on_blank_pictures(blank: Evaluation | None) -> dict[str, float]:
    if blank is None:
        return {}
    ((_, count),) = Counter(item.answer for item in blank.transcripts).most_common(1)
    return {"accuracy_blank": blank.accuracy, "accuracy_of_guessing": count / len(blank.transcripts)}


def write_transcripts(path: Path, before: Evaluation, after: Evaluation) -> None:
    lines = ["# The same held-out problems before and after training, greedy", ""]
    for old, new in list(zip(before.transcripts, after.transcripts, strict=True))[:TRANSCRIPTS]:
        lines += [f"**{old.prompt}** ({old.answer})", ""]
        for when, item in (("before", old), ("after", new)):
            written = " ".join(json.dumps(turn.text) for turn in item.turns) or json.dumps(item.completion)
            lines.append(f"- {when}, {'right' if item.correct else 'wrong'}: {written}")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>The same held-out problems before and after training</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
td, th {{ padding: .4em 1em .4em 0; text-align: left }}
img {{ display: block; image-rendering: pixelated; width: 168px }}
.right {{ color: #1a7f37 }} .wrong {{ color: #c0392b }}
</style>
<h1>The same held-out problems before and after training, greedy</h1>
<p>{accuracies}</p>
<table><tr><th>picture<th>answer<th>before<th>after</tr>
{rows}
</table>
</html>
"""


def write_pictures(path: Path, before: Evaluation, after: Evaluation, summary: Mapping[str, Any]) -> None:
    """Writes the transcripts as a page with the pictures."""
    rows = [
        f'<tr><td><img src="{data_url(old.images[0])}" alt="a sum">'
        f"<td>{escape(old.answer)}{_cell(old)}{_cell(new)}</tr>"
        for old, new in list(zip(before.transcripts, after.transcripts, strict=True))[:TRANSCRIPTS]
    ]
    page = _PAGE.format(accuracies=escape(_accuracies(summary)), rows="\n".join(rows))
    path.write_text(page, encoding="utf-8")


def _cell(transcript: Transcript) -> str:
    verdict = "right" if transcript.correct else "wrong"
    return f'<td class="{verdict}">{verdict}<br><code>{escape(transcript.completion)}</code>'


def _accuracies(summary: Mapping[str, Any]) -> str:
    before, after, blank, guessing = (
        f"{summary[f'accuracy_{name}']:.3f}" for name in ("before", "after", "blank", "of_guessing")
    )
    return (
        f"greedy accuracy with pictures: {before} before training, {after} after it; with blank pictures: {blank}, "
        f"where always giving the most frequent answer gets {guessing}"
    )


def print_summary(summary: dict[str, Any], directory: RunDirectory, console: Console) -> None:
    table = Table("held-out problems", "before", "after", title="what the model learnt")
    for label, name in (
        ("accuracy, greedy", "accuracy"),
        ("accuracy, sampled", "sampled_accuracy"),
        ("format, greedy", "format"),
        ("calls a tool, greedy", "calls"),
    ):
        if f"{name}_before" not in summary:
            continue
        table.add_row(label, f"{summary[name + '_before']:.3f}", f"{summary[name + '_after']:.3f}")
    console.print(table)
    if "accuracy_blank" in summary:
        console.print(_accuracies(summary), highlight=False)
    stages = summary["seconds_by_stage"]
    work = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())
    console.print(
        f"{summary['steps']} steps in {summary['seconds']:.1f} s, {summary['seconds_total']:.1f} s overall; "
        f"working time: {work}, {sum(stages.values()):.1f} s in total",
        highlight=False,
    )
    kl = summary["kl_at_step_0"]
    verdict = "as expected" if kl < MAX_KL_AT_STEP_0 else "WRONG: policy and reference must agree before training"
    console.print(f"KL to the reference at step 0: {kl:.1e}, {verdict}", highlight=False)
    transcripts = "transcripts.html" if "accuracy_blank" in summary else "transcripts.md"
    left = f"summary.json, report.html, {transcripts}, metrics.jsonl, model/"
    console.print(f"see {directory.root}: {left}", highlight=False)
