"""The samples of a page: how the model's answers have changed over the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from policy_trainer.reporting.sample_views import by_reward
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup

T = TypeVar("T")

# Steps that are shown, from the first to the last; held-out problems, and characters at both ends of a text.
_STEPS = 5
_PROBLEMS = 4
_HEAD, _TAIL = 3000, 1000


@dataclass(frozen=True)
class Answer:
    """A completion with its prompt. label: what is said of it."""

    label: str
    group: SampledGroup
    completion: SampledCompletion


@dataclass(frozen=True)
class Chapter:
    """The answers of a step, or to a problem."""

    title: str
    answers: tuple[Answer, ...]


def training_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """The best and the worst completion of the first, some middle and the last step that samples were kept of."""
    training = [group for group in groups if group.kind == "train"]
    steps = _spread(sorted({group.step or 0 for group in training}), _STEPS)
    return [Chapter(f"Step {step}", _ends([group for group in training if group.step == step])) for step in steps]


def held_out_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """Some held-out problems, each with its answers at the first, a middle and the last evaluation."""
    held_out = [group for group in groups if group.kind == "eval"]
    chapters = []
    for problem in list(dict.fromkeys((group.problem, group.prompt) for group in held_out))[:_PROBLEMS]:
        of_it = [group for group in held_out if (group.problem, group.prompt) == problem]
        answers = tuple(Answer(f"step {group.step}", group, group.completions[0]) for group in _spread(of_it, 3))
        chapters.append(Chapter("Held-out problem" + ("" if problem[0] is None else f" {problem[0]}"), answers))
    return chapters


def cut(text: str) -> str:
    """Both ends of a long text."""
    left_out = len(text) - _HEAD - _TAIL
    return text if left_out <= 0 else f"{text[:_HEAD]}\n… {left_out:,} more characters …\n{text[-_TAIL:]}"


def _ends(groups: Sequence[SampledGroup]) -> tuple[Answer, ...]:
    owner = {id(item): group for group in groups for item in group.completions}
    ranked = by_reward([item for group in groups for item in group.completions])
    ends = {"best": ranked[-1]} | ({"worst": ranked[0]} if len(ranked) > 1 else {})
    return tuple(Answer(label, owner[id(item)], item) for label, item in ends.items())


def _spread(items: Sequence[T], most: int) -> list[T]:
    """The first, the last, and evenly chosen ones between them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
