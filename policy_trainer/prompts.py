"""Problems as token ids, and completions as rewards: where text and tokens meet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, DataConfig
from policy_trainer.rewards import choose_rewards
from policy_trainer.sampling.interface import Completion
from policy_trainer.tasks.interface import Problem, Task
from shared.models import context_length
from shared.refusal import Refused


class PromptTooLong(Refused):
    """A prompt has more tokens than data.max_prompt_tokens, or leaves no room for a completion."""


class PromptEncoder:
    """Problem -> token ids, through the chat template for messages and as it stands for a plain prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, room: int | None = None) -> None:
        """room: tokens that a prompt may have besides, see `prompt_room`."""
        self._tokenizer = tokenizer
        self._data = data
        self._limit = data.max_prompt_tokens if room is None else min(room, data.max_prompt_tokens)

    def encode(self, problem: Problem) -> list[int]:
        """Raises PromptTooLong, or Refused where the model and the data do not go together."""
        ids = self._encode_messages(problem) if problem.messages else self._encode_text(problem.prompt)
        if len(ids) > self._limit:
            why = "data.max_prompt_tokens, or what the model's context leaves"
            raise PromptTooLong(f"a prompt has {len(ids)} tokens and may have {self._limit}: {why}")
        return ids

    def _encode_messages(self, problem: Problem) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise Refused("the model has no chat template: give problems with a plain prompt instead of messages")
        messages = [dict(message) for message in problem.messages]
        if self._data.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        # As text first: the template writes the special tokens itself, so none are added.
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # some take no system message, or want roles to alternate
            raise Refused(f"the model's chat template does not take {messages}: {error}") from error
        return self._tokenizer.encode(str(text), add_special_tokens=False)

    def _encode_text(self, prompt: str) -> list[int]:
        if self._data.system_prompt:
            raise Refused("data.system_prompt needs problems with messages: a plain prompt is taken as it stands")
        return self._tokenizer.encode(prompt)


def prompt_room(model: PreTrainedModel, max_new_tokens: int) -> int | None:
    """Tokens that the model's context leaves for a prompt; None when it has no bound. Raises Refused when none are."""
    context = context_length(model)
    if context is None:
        return None
    if context <= max_new_tokens:
        raise Refused(f"sampling.max_new_tokens: {max_new_tokens} leave no room in the model's context of {context}")
    return context - max_new_tokens


@dataclass(frozen=True, eq=False)
class Judgement:
    """rewards: float32 (G,) weighted totals, NaN where a part could not be judged. parts: float32 (G,) each."""

    rewards: np.ndarray
    parts: dict[str, np.ndarray]


class Judge:
    """Completions -> rewards by name and their weighted sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: Task, config: CommonConfig) -> None:
        self._tokenizer = tokenizer
        self._rewards = choose_rewards(config.rewards or list(task.default_rewards), task.compare)
        self._weights = config.reward_weights or [1.0] * len(self._rewards)

    def judge(self, problem: Problem, completions: Sequence[Completion]) -> Judgement:
        texts = [self.text(completion) for completion in completions]
        parts = {
            name: np.array([reward(text, problem.answer) for text in texts], dtype=np.float32)
            for name, reward in self._rewards.items()
        }
        total = sum(weight * part for weight, part in zip(self._weights, parts.values(), strict=True))
        return Judgement(np.asarray(total, dtype=np.float32), parts)

    def text(self, completion: Completion) -> str:
        """For judging and reading only: nothing is ever tokenised again."""
        return self.decode(completion.ids.tolist())

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
