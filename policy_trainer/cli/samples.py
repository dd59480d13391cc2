"""The command `policy-trainer samples`: what a run's model wrote."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from policy_trainer.reporting.sample_views import by_reward, view
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup, as_json, read_samples
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError, printable_json

# Completions that --worst and --best show unless --limit says otherwise.
_RANKED = 5


def run(arguments: list[str]) -> int:
    """Prints the samples of the newest step, or the ones that the options choose.

    Raises UserError when there are none.
    """
    options = _parser().parse_args(arguments)
    path = RunDirectory(options.run_dir).samples
    groups = _chosen(read_samples(path), options, path)
    if options.json:
        print(printable_json(json.dumps([as_json(group) for group in groups], indent=2, ensure_ascii=False)))
        return 0
    console = Console(highlight=False)
    for group in groups:
        console.print(view(group, console))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="policy-trainer samples",
        description="Prints prompts with their completions, rewards and advantages, from RUN/samples.jsonl: those of "
        "the newest step unless an option says otherwise.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, metavar="N", help="those of step N")
    parser.add_argument("--batch", metavar="ID", help="those of one batch, as `ref-server queue ls` names it")
    parser.add_argument("--kind", choices=("train", "eval"), help="only those of training, or of evaluations")
    ranked = parser.add_mutually_exclusive_group()
    for name, which in (("worst", "lowest"), ("best", "highest")):
        text = f"the completions with the {which} rewards, of all steps unless --step is given"
        ranked.add_argument(f"--{name}", dest="ranked", action="store_const", const=name, help=text)
    parser.add_argument("--limit", type=int, metavar="N", help=f"at most N; {_RANKED} of --worst or --best")
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser


def _chosen(groups: Sequence[SampledGroup], options: Namespace, path: Path) -> list[SampledGroup]:
    wanted: Mapping[str, object] = {
        name: value for name in ("step", "batch", "kind") if (value := getattr(options, name)) is not None
    }
    matching = [group for group in groups if all(getattr(group, name) == value for name, value in wanted.items())]
    if not matching:
        raise UserError(_nothing(groups, wanted, path))
    if options.ranked:
        return _ranked(matching, options.ranked, options.limit or _RANKED)
    if not wanted.keys() & {"step", "batch"}:
        matching = [group for group in matching if group.step == matching[-1].step]
    return matching[: options.limit]


def _nothing(groups: Sequence[SampledGroup], wanted: Mapping[str, object], path: Path) -> str:
    if not groups:
        state = "is empty" if path.exists() else "does not exist"
        return f"RUN: {path} {state}: name the directory of a run that has trained a step"
    steps = shorten(
        ", ".join(str(step) for step in sorted({group.step or 0 for group in groups})), 200, placeholder=" …"
    )
    filters = ", ".join(f"--{name} {value}" for name, value in wanted.items())
    return f"{filters}: {path} has no such samples; it has those of steps {steps}"


def _ranked(groups: Sequence[SampledGroup], which: str, limit: int) -> list[SampledGroup]:
    """The worst or best completions, those of a prompt together."""
    owner = {id(item): place for place, group in enumerate(groups) for item in group.completions}
    items = by_reward([item for group in groups for item in group.completions])
    chosen: dict[int, list[SampledCompletion]] = {}
    for item in (items[::-1] if which == "best" else items)[:limit]:
        chosen.setdefault(owner[id(item)], []).append(item)
    return [replace(groups[place], completions=tuple(of_prompt)) for place, of_prompt in chosen.items()]
