"""The samples that a report shows: how the model's answers have changed over the run."""

from collections.abc import Sequence
from typing import TypeVar

from policy_trainer.reporting.sample_views import by_reward
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup

T = TypeVar("T")

# How many steps are shown, from the first to the last; how many held-out problems; characters at both ends of a text.
_STEPS = 5
_PROBLEMS = 4
_HEAD, _TAIL = 3000, 1000


# A title, and what stands below it: completions, each with a label and its group, which has the prompt.
Chapter = tuple[str, list[tuple[str, SampledGroup, SampledCompletion]]]


def training_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """The best and the worst completion of the first, some middle and the last step that samples were kept of."""
    training = [group for group in groups if group.kind == "train"]
    steps = spread(sorted({group.step or 0 for group in training}), _STEPS)
    return [(f"Step {step}", _ends([group for group in training if group.step == step])) for step in steps]


def held_out_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """Some held-out problems, each with its answers at the first, a middle and the last evaluation."""
    held_out = [group for group in groups if group.kind == "eval"]
    chapters = []
    for problem in list(dict.fromkeys((group.problem, group.prompt) for group in held_out))[:_PROBLEMS]:
        of_it = [group for group in held_out if (group.problem, group.prompt) == problem]
        answers = [(f"step {group.step}", group, group.completions[0]) for group in spread(of_it, 3)]
        chapters.append(("Held-out problem" + ("" if problem[0] is None else f" {problem[0]}"), answers))
    return chapters


def cut(text: str) -> str:
    """Both ends of a long text."""
    left_out = len(text) - _HEAD - _TAIL
    return text if left_out <= 0 else f"{text[:_HEAD]}\n… {left_out:,} more characters …\n{text[-_TAIL:]}"


def _ends(groups: Sequence[SampledGroup]) -> list[tuple[str, SampledGroup, SampledCompletion]]:
    """The best and the worst completion."""
    owner = {id(item): group for group in groups for item in group.completions}
    ranked = by_reward([item for group in groups for item in group.completions])
    ends = {"best": ranked[-1]} | ({"worst": ranked[0]} if len(ranked) > 1 else {})
    return [(label, owner[id(item)], item) for label, item in ends.items()]


def spread(items: Sequence[T], most: int) -> list[T]:
    """The first item, the last, and evenly chosen items between them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
