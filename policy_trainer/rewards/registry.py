"""Rewards by the names that the configuration uses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

from policy_trainer.config import ENVIRONMENT, CommonConfig, PenaltyConfig
from policy_trainer.config.functions import CALLER
from policy_trainer.data.problem import Correct, Reward, Sample, Task
from policy_trainer.rewards.answers import (
    format_reward,
    math_accuracy,
    needs_sandbox,
    reads_tags,
    tags_reward,
    task_accuracy,
)
from policy_trainer.rewards.function_server import CallerReward
from policy_trainer.rewards.http_reward import SCHEMES, HttpReward
from policy_trainer.rewards.mathematics import grader, library
from policy_trainer.rewards.recipes import (
    easyr1_math_accuracy,
    easyr1_math_format,
    easyr1_r1v_accuracy,
    easyr1_r1v_format,
    grpo_zero_equation,
    grpo_zero_format,
    lm_book_correct,
    lm_book_tags,
    nano_aha_equation,
    nano_aha_format,
    open_r1_accuracy,
    open_r1_format,
    open_r1_tag_count,
    simple_grpo_accuracy,
    simple_grpo_format,
)
from policy_trainer.rewards.reward_model import RewardModel
from policy_trainer.rewards.sandbox import Sandboxed
from shared.errors import UserError


def length_penalty(penalty: PenaltyConfig) -> Reward:
    """Falls linearly from 0 to -1 at `length_tokens` tokens, and stays at -1 beyond."""
    return lambda sample: -min(1.0, sample.tokens / penalty.length_tokens)


def repetition_penalty(penalty: PenaltyConfig) -> Reward:
    """-repetition_max times the share of word n-grams that are repetitions (arXiv 2502.03373, C.2); 0 for a text that
    is shorter than an n-gram."""
    ngram = penalty.repetition_ngram

    def score(sample: Sample) -> float:
        words = sample.sampled.lower().split()
        total = len(words) - ngram + 1
        if total < 1:
            return 0.0
        different = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
        return -penalty.repetition_max * (1 - different / total)

    return score


def soft_overlong_penalty(penalty: PenaltyConfig, longest: int) -> Reward:
    """0 up to longest - overlong_tokens tokens, then falls linearly to -1 at `longest` (DAPO, arXiv 2503.14476, 13).

    longest: sampling.max_completion_length. Raises UserError if that is shorter than overlong_tokens.
    """
    margin = penalty.overlong_tokens
    if margin > longest:
        raise UserError(
            f"judging.penalty.overlong_tokens: must be at most sampling.max_completion_length ({longest}), got {margin}"
        )
    return lambda sample: -min(1.0, max(0.0, (sample.tokens - (longest - margin)) / margin))


NOTHING = "none"
# Prefix of the name of a reward model, before its path, where there are several.
_MODEL = "model/"


def no_reward(sample: Sample) -> float:
    """0 for every completion, which needs no gold answer."""
    return 0.0


def environment_reward(sample: Sample) -> float | None:
    """What the environment's get_reward returned; None if it has none."""
    return sample.environment_reward


# A plain function runs in this process: its time must be linear in the length of the completion, whatever the text.
Rule = Reward | Sandboxed | CallerReward | HttpReward | RewardModel

RULES: Mapping[str, Reward | Sandboxed] = {
    NOTHING: no_reward,
    ENVIRONMENT: environment_reward,
    "format": format_reward,
    "tags": tags_reward,
    "math/accuracy": Sandboxed(math_accuracy, library, cut_off=0.0),
    "simple_grpo/accuracy": Sandboxed(simple_grpo_accuracy, library, cut_off=-1.0),
    "simple_grpo/format": simple_grpo_format,
    "lm_book/correct": lm_book_correct,
    "lm_book/tags": lm_book_tags,
    "open_r1/accuracy": Sandboxed(open_r1_accuracy, library, cut_off=0.0),
    "open_r1/format": open_r1_format,
    "open_r1/tag_count": open_r1_tag_count,
    "easyr1_math/accuracy": Sandboxed(easyr1_math_accuracy, grader, cut_off=0.0),
    "easyr1_math/format": easyr1_math_format,
    "easyr1_r1v/accuracy": Sandboxed(easyr1_r1v_accuracy, grader, cut_off=0.0),
    "easyr1_r1v/format": easyr1_r1v_format,
    "nano_aha/format": nano_aha_format,
    "nano_aha/equation": nano_aha_equation,
    "grpo_zero/format": grpo_zero_format,
    "grpo_zero/equation": grpo_zero_equation,
}

# Complete recipes: the rewards that each consists of, with their weights.
SUMS: Mapping[str, Mapping[str, float]] = {
    "gsm8k/simple_grpo": {"simple_grpo/accuracy": 1.0, "simple_grpo/format": 1.0},
    "gsm8k/lm_book": {"lm_book/correct": 1.0, "lm_book/tags": 1.0},
    "math/open_r1": {"open_r1/accuracy": 1.0, "open_r1/format": 1.0, "open_r1/tag_count": 1.0},
    "easyr1/math": {"easyr1_math/accuracy": 0.9, "easyr1_math/format": 0.1},
    "easyr1/r1v": {"easyr1_r1v/accuracy": 0.5, "easyr1_r1v/format": 0.5},
    "countdown/nano_aha": {"nano_aha/format": 1.0, "nano_aha/equation": 1.0},
    "countdown/grpo_zero": {"grpo_zero/format": 0.1, "grpo_zero/equation": 1.0},
}


# Rewards that compare with a gold answer.
_GOLDEN = frozenset(
    {
        "accuracy", "math/accuracy", "simple_grpo/accuracy", "lm_book/correct", "open_r1/accuracy",
        "easyr1_math/accuracy", "easyr1_r1v/accuracy",
    }
)  # fmt: skip
# Rewards that measure correctness.
_RIGHT = _GOLDEN | {"nano_aha/equation", "grpo_zero/equation"}
# Rewards that look for <answer> tags; accuracy does so where the task's `correct` does.
_TAGGED = frozenset(
    {
        "format", "tags", "simple_grpo/format", "lm_book/correct", "lm_book/tags", "open_r1/format",
        "open_r1/tag_count", "easyr1_r1v/accuracy", "easyr1_r1v/format", "nano_aha/format", "nano_aha/equation",
        "grpo_zero/format", "grpo_zero/equation",
    }
)  # fmt: skip


def choose_rewards(config: CommonConfig, task: Task) -> dict[str, Rule]:
    """The configured rewards, else the task's defaults, by name and in order; a recipe's name gives its parts.

    Raises UserError for an unknown name, a name that is given twice, and a reward whose settings are missing or wrong.
    """
    return {name: _rule(name, config, task) for name in part_weights(config, task)}


def part_weights(config: CommonConfig, task: Task) -> dict[str, float]:
    """The weights of the rewards by the names of a batch's `reward_parts`, as in `choose_rewards`; loads nothing.

    Raises UserError for a name that is given twice.
    """
    names = config.rewards or list(task.default_rewards)
    weights = config.reward_weights or [1.0] * len(names)
    chosen: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        for part, share in SUMS.get(name, {name: 1.0}).items():
            if part in chosen:  # one of the two weights would be lost
                raise UserError(f"rewards: {part!r} is given twice")
            chosen[part] = weight * share
    return chosen


def needs_answers(rewards: Sequence[str]) -> bool:
    """Whether any of these rewards compares with a gold answer. Without names, the task's rewards do."""
    return not rewards or not _GOLDEN.isdisjoint(_parts(rewards))


def measures_correctness(parts: Iterable[str]) -> bool:
    """Whether any of these rewards (or parts of recipes) judges correctness; only then is an accuracy measured.

    Without any rewards the task judges it, since nothing else measures how good the answers are.
    """
    return not _RIGHT.isdisjoint(names := set(parts)) or names == {NOTHING}


def tagged_rewards(rewards: Iterable[str], correct: Correct) -> frozenset[str]:
    """The rewards among these that look for <answer> tags. correct: the task's judgement, which `accuracy` uses."""
    return frozenset(_parts(rewards) & (_TAGGED | ({"accuracy"} if reads_tags(correct) else set())))


def _parts(rewards: Iterable[str]) -> set[str]:
    """The names of the rewards, with a recipe replaced by its parts."""
    return {part for name in rewards for part in SUMS.get(name, (name,))}


def accuracy_reward(task: Task) -> Reward | Sandboxed:
    score = partial(task_accuracy, task.correct)
    return Sandboxed(score, library, cut_off=0.0) if needs_sandbox(task.correct) else score


def _rule(name: str, config: CommonConfig, task: Task) -> Rule:
    if name in RULES:
        return RULES[name]
    if name in CONFIGURED:
        return CONFIGURED[name](config, task)
    if name.startswith(f"{CALLER}:"):
        return CallerReward(name, seconds=config.judging.seconds)
    if name.startswith(SCHEMES):
        return HttpReward(name, config.judging.http)
    if name.startswith(_MODEL):
        return RewardModel(config.judging.model.model_copy(update={"path": name.removeprefix(_MODEL)}))
    if ":" in name:
        return Sandboxed(name)
    known = sorted([*RULES, *CONFIGURED, *SUMS])
    near = get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "give module:function or http://… for your own"
    raise UserError(f"rewards: {name!r} is none of {', '.join(known)}", remedy)


CONFIGURED: Mapping[str, Callable[[CommonConfig, Task], Rule]] = {
    "accuracy": lambda config, task: accuracy_reward(task),
    "length": lambda config, task: length_penalty(config.judging.penalty),
    "repetition": lambda config, task: repetition_penalty(config.judging.penalty),
    "soft_overlong": lambda config, task: soft_overlong_penalty(
        config.judging.penalty, config.sampling.max_completion_length
    ),
    "model": lambda config, task: RewardModel(config.judging.model),
}
