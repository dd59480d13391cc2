"""Tells at once, after a run's first steps, that its rewards teach nothing, and why."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.algorithms.objective.group import RewardParts, compared_rewards, has_variance
from policy_trainer.config import LossConfig
from policy_trainer.reporting.conversations import limit_of, rollout_metrics
from policy_trainer.reporting.health import Trouble
from shared.batch import Batch
from shared.models import decode
from shared.spelling import spell_setting

# What is looked at, at least: few groups may be alike by chance.
_STEPS, _GROUPS = 2, 8
ANSWER = "<answer>"
# The share of completions cut off from which this is the likely cause.
_MOSTLY = 0.75
# Characters of a completion that are shown.
_SHOWN = 160
# Completions without a reward whose beginnings are shown.
_SHOWN_COMPLETIONS = 3


def last_of_first(groups_per_step: int, max_steps: int) -> int:
    """The step after which enough groups were seen."""
    return min(max_steps, max(_STEPS, math.ceil(_GROUPS / groups_per_step)))


def unrewarded(completions: Sequence[str], rewards: Sequence[str], tagged: Set[str]) -> str:
    """Says what rewards look for that give these completions nothing, and how the first of them begin. tagged: names of
    the rewards that look for answer tags."""
    looking = ", ".join(name for name in rewards if name in tagged)
    with_tags = sum(ANSWER in text for text in completions) or "none"
    tags = f" ({looking} looks for {ANSWER} tags, which {with_tags} of them have)" if looking else ""
    beginnings = "\n".join(f"  {_beginning(text)}" for text in completions[:_SHOWN_COMPLETIONS])
    names = ", ".join(rewards) or "the rewards"
    return (
        f"{names} gave all {len(completions)} the same, 0 or less{tags}. A run learns only from problems that some "
        f"completions solve. They begin:\n{beginnings}"
    )


def _beginning(text: str) -> str:
    """Of a completion, in quotes and on one line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …") if line else "(empty)"


class NothingToLearn(Trouble):
    def __str__(self) -> str:
        return f"the first steps teach little or nothing: {self.remedy}"


@dataclass
class FirstSteps:
    """Watches the batches of a run's first steps.

    last: the step after which it speaks. tagged: names of the rewards that look for answer tags. loss: the run's
    settings. apart: the weights of rewards that are compared apart, by name; None if their sum is.
    """

    last: int
    tokenizer: PreTrainedTokenizerBase
    tagged: Set[str]
    loss: LossConfig
    apart: Mapping[str, float] | None = None
    _seen: list[Batch] = field(default_factory=list, init=False)

    def observe(self, step: int, batches: Sequence[Batch]) -> list[Trouble]:
        """What is wrong after this step: at most one trouble, with the cause to fix first."""
        if step > self.last:
            return []
        self._seen += batches
        if step < self.last or not self._seen:
            return []
        evidence = _Evidence(self._seen, self._decode, self.tagged, self.apart)
        self._seen = []
        remedy = next(_remedies(evidence, self.loss), None)
        mean = float(np.mean(evidence.rewards))
        return [NothingToLearn("reward", mean, "not the same for all completions", remedy)] if remedy else []

    def _decode(self, ids: np.ndarray) -> str:
        return decode(self.tokenizer, ids.tolist())  # with special tokens: tags may be special tokens


class _Evidence:
    """The first batches, read as the remedies need them."""

    def __init__(
        self,
        batches: list[Batch],
        decode: Callable[[np.ndarray], str],
        tagged: Set[str],
        apart: Mapping[str, float] | None,
    ) -> None:
        self.rewards = np.concatenate([batch.rewards for batch in batches])
        names = {name for batch in batches for name in batch.reward_parts}
        self.parts = {
            name: np.concatenate([batch.reward_parts.get(name, np.empty(0, np.float32)) for batch in batches])
            for name in sorted(names)
        }
        self.alike = not any(has_variance(_compared(batch, apart)) for batch in batches)
        self.cut_off = sum(int((~batch.finished).sum()) for batch in batches)
        self.limit = _limit(batches)
        self.tagged = sorted(tagged & names)
        texts = [decode(ids) for batch in batches for ids in _sampled(batch)]
        self.without_answer = bool(self.tagged) and not any(ANSWER in text for text in texts)
        self.tags_requested = any(ANSWER in decode(batch.group.prompt_ids) for batch in batches)
        self.count = len(self.rewards)
        self.example = f"One begins: {_beginning(texts[0])}"


def _sampled(batch: Batch) -> Iterator[np.ndarray]:
    """Of each completion the ids that the model sampled."""
    if batch.loss_mask is None:
        yield from batch.group.completions()
        return
    for ids, mask in zip(batch.group.completions(), batch.group.split(batch.loss_mask), strict=True):
        yield ids[mask]


def _limit(batches: Sequence[Batch]) -> str:
    """The option that cut most completions off."""
    setting = limit_of(rollout_metrics(batches))
    return f"--{setting.replace('_', '-')}"


def _compared(batch: Batch, apart: Mapping[str, float] | None) -> np.ndarray:
    parts = None if apart is None else RewardParts.of(batch.reward_parts, apart)
    return compared_rewards(batch.rewards, batch.steps, parts)


def _remedies(evidence: _Evidence, loss: LossConfig) -> Iterator[str]:
    """Why the run cannot learn, and the remedy; the most urgent first.

    A teacher teaches whatever the rewards are, but completions that cannot be judged do not train.
    """
    count, example, tagged = evidence.count, evidence.example, ", ".join(evidence.tagged)
    if np.isnan(evidence.rewards).all():
        yield _unjudged(evidence)
    if loss.distillation:
        return
    if evidence.without_answer and not evidence.tags_requested:
        yield (
            f"the rewards {tagged} look for {ANSWER} tags, which none of the {count} completions has and no prompt "
            f"asks for. Ask for them with {spell_setting('data.system_prompt')}, or in the problems; of your own rows, "
            f"{spell_setting('data.answer_in')} may look elsewhere. {example}"
        )
    if evidence.cut_off >= _MOSTLY * count and (evidence.alike or evidence.without_answer):
        cut = f"all {count}" if evidence.cut_off == count else f"{evidence.cut_off} of {count}"
        yield f"{cut} completions were cut off before their end: raise {evidence.limit}. {example}"
    if evidence.without_answer:
        yield (
            f"the prompts ask for {ANSWER} tags, which the rewards {tagged} look for, and none of the {count} "
            f"completions has them: ask more plainly ({spell_setting('data.system_prompt')}), show the form first "
            f"(policy-trainer sft), or take a stronger model. {example}"
        )
    if evidence.alike:
        yield f"{_alike(evidence)}. {example}"


def _unjudged(evidence: _Evidence) -> str:
    failed = [name for name, part in evidence.parts.items() if np.isnan(part).all()]
    custom = [name for name in failed if ":" in name]
    if custom:
        return f"{', '.join(custom)} gave none of the {evidence.count} completions a number; the worker's log says why"
    if "accuracy" in failed:
        return (
            f"none of the gold answers of {evidence.count} completions can be judged: look at the column of the "
            f"answers ({spell_setting('data.columns.answer')}), and at {spell_setting('data.answer_rule')}"
        )
    return f"none of the {evidence.count} completions has a reward: {', '.join(failed)} gave NaN; see the worker's log"


def _alike(evidence: _Evidence) -> str:
    right = evidence.parts.get("accuracy", np.full(1, np.nan))
    if (right == 1).all():
        return f"all {evidence.count} completions are right: the problems are too easy, take harder ones"
    if (right == 0).all():
        return (
            f"all {evidence.count} completions are wrong: take easier problems or a stronger model, or see whether "
            f"{spell_setting('data.answer_rule')} and {spell_setting('data.answer_in')} suit the answers"
        )
    return (
        f"within each group all completions have the same reward: raise {spell_setting('sampling.num_generations')}, "
        "take problems that are sometimes solved, or add a reward that differs"
    )
