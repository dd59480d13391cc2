"""Checks at the start of a command that a model, its tokenizer, the problems and the rewards are compatible."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.data.pictures import PLACEHOLDER
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import PromptEncoder, UnusablePrompt, prompt_encoder
from policy_trainer.data.rendering import end_of_answer
from policy_trainer.rewards.answers import TAGS
from policy_trainer.rewards.registry import tagged_rewards
from shared.errors import UserError
from shared.models import decode, eos_token_ids, refuse_unknown_ids
from shared.spelling import spell_setting

# Number of problems to check. All of a million rows would take minutes in each process.
_FIRST = 64
_TAG = re.compile(r"</?\w+>")
_ANSWER_TAGS = {"<answer>", "</answer>"}


@dataclass(frozen=True)
class CompatibilityWarning:
    """What the user should know, and what to do about it."""

    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.seen}; {self.remedy}"


def check_compatibility(
    config: CommonConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    held_out: bool = False,
    max_image_bytes: int | None = None,
) -> list[CompatibilityWarning]:
    """What the user should know before the command begins. model: only its shapes are read. held_out: whether the
    problems are those for evaluation. max_image_bytes: see PromptEncoder.

    Raises UserError if the model can use none of the first problems, or not their pictures, and if the tokenizer drops
    the tags that rewards look for.
    """
    refuse_unknown_ids(eos_token_ids(model, tokenizer), model, tokenizer)
    encoder = prompt_encoder(config, tokenizer, model, max_image_bytes=max_image_bytes)
    _check_first(encoder, _first(task, held_out=held_out))
    first = [*islice(_first(task, held_out=held_out), 1)]
    ends = {*eos_token_ids(model, tokenizer), *config.sampling.stop_token_ids}
    return [
        *_answered(encoder, first),
        *_unending(encoder, tokenizer, first, ends),
        *_dropped_tags(config, task, tokenizer, first),
    ]


def _first(task: Task, *, held_out: bool) -> Iterator[Problem]:
    if not held_out:
        return (task.problem(index) for index in range(_FIRST))
    problems = task.eval_problems()
    return (problems[place] for place in range(min(_FIRST, len(problems))))


def _check_first(encoder: PromptEncoder, problems: Iterator[Problem]) -> None:
    """Raises UserError if none of the problems can be used. One usable problem is enough: others are left out."""
    first: UnusablePrompt | None = None
    for problem in problems:
        try:
            encoder.encode(problem)
        except UnusablePrompt as error:
            first = first or error
            continue
        break
    else:
        if first is not None:
            raise UserError(first.problem, first.remedy) from first
    for problem in problems:
        if problem.images:
            encoder.require_vision()
            break


def _answered(encoder: PromptEncoder, problems: list[Problem]) -> Iterator[CompatibilityWarning]:
    """Of problems that end with an answer."""
    for problem in problems:
        if encoder.in_chat(problem) and not problem.prompt and problem.messages[-1]["role"] == "assistant":
            yield CompatibilityWarning(
                "data: the first problem's last message is the assistant's, behind which the chat template opens "
                "another answer, as in TRL",
                f"leave it out; {spell_setting('data.assistant_prefill')} is for how all answers begin",
            )


def _unending(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], ends: set[int]
) -> Iterator[CompatibilityWarning]:
    """Of a chat template whose answers end with none of these ids, as when a base model is given one."""
    last = end_of_answer(tokenizer)
    if last is not None and last not in ends and any(encoder.in_chat(problem) for problem in problems):
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in sorted(ends))
        yield CompatibilityWarning(
            f"model: the chat template ends an answer with {tokenizer.convert_ids_to_tokens(last)} ({last}), but "
            f"sampling stops only at {names}",
            f"set eos_token_id in the model's generation_config.json to {sorted([*ends, last])}, or give "
            f"{spell_setting('sampling.stop_token_ids', last)}",
        )


def _dropped_tags(
    config: CommonConfig, task: Task, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]
) -> list[CompatibilityWarning]:
    """Remarks on tags that are special tokens of the tokenizer, and therefore missing from texts that rewards judge.
    Raises UserError for answer tags that rewards look for."""
    rewards = ", ".join(sorted(tagged_rewards(config.rewards or task.default_rewards, task.correct)))
    written = str(tokenizer.chat_template or "")
    requested = [tag for problem in problems for tag in _TAG.findall(_texts(config, problem))]
    requested = [tag for tag in requested if tag not in written and tag != PLACEHOLDER]
    added = tokenizer.get_added_vocab()  # type: ignore[operator]
    dropped = [
        tag
        for tag in dict.fromkeys([*(TAGS if rewards else ()), *requested])
        if tag in added and tag not in decode(tokenizer, [added[tag]], skip_special_tokens=True)
    ]
    if not dropped:
        return []
    message = (
        f"model: {', '.join(dropped)} {'is a special token' if len(dropped) == 1 else 'are special tokens'} of its "
        "tokenizer, which drops them from the texts that rewards judge"
    )
    remedy = 'set "special": false for them in its tokenizer.json and tokenizer_config.json'
    if rewards and _ANSWER_TAGS & set(dropped):
        raise UserError(
            f"{message}: {rewards} would find no answer", f"{remedy}, or choose other {spell_setting('rewards')}"
        )
    return [CompatibilityWarning(f"{message}: a reward that looks for them finds none", remedy)]


def _texts(config: CommonConfig, problem: Problem) -> str:
    """The texts of a problem that may request tags."""
    system = config.data.system_prompt
    contents = [message["content"] for message in problem.messages]
    return "\n".join([problem.system_prompt if system is None else system, *contents, problem.prompt])
