"""Problems as token ids, and completions as rewards: where text and tokens meet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, DataConfig
from policy_trainer.rewards import choose_rewards
from policy_trainer.sampling.interface import Completion
from policy_trainer.tasks.interface import Problem, Task
from shared.refusal import Refused


class PromptTooLong(Refused):
    """A prompt has more tokens than data.max_prompt_tokens."""


class PromptEncoder:
    """Problem -> token ids, through the chat template for messages and as it stands for a plain prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._data = data

    def encode(self, problem: Problem) -> list[int]:
        """Raises PromptTooLong, or ValueError where the model and the data do not go together."""
        ids = self._encode_messages(problem) if problem.messages else self._encode_text(problem.prompt)
        limit = self._data.max_prompt_tokens
        if len(ids) > limit:
            raise PromptTooLong(f"a prompt has {len(ids)} tokens; data.max_prompt_tokens is {limit}")
        return ids

    def _encode_messages(self, problem: Problem) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise Refused("the model has no chat template: give problems with a plain prompt instead of messages")
        messages = [dict(message) for message in problem.messages]
        if self._data.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        # As text first: the template writes the special tokens itself, so none are added.
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(str(text), add_special_tokens=False)

    def _encode_text(self, prompt: str) -> list[int]:
        if self._data.system_prompt:
            raise Refused("data.system_prompt needs problems with messages: a plain prompt is taken as it stands")
        return self._tokenizer.encode(prompt)


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
        return str(self._tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True))
