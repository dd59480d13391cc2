"""A tiny model that has learned to call tools: seconds of training on turns that a test writes."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.cli.demo.base_model import imitate, make_model
from policy_trainer.cli.demo.tool_model import make_tool_tokenizer
from policy_trainer.config import PromptConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.supervised.sft import Demonstration

_BATCH = 8


def make_calling_model(
    rollouts: Iterator[Sequence[str]], answer: str, steps: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """rollouts: of each, the model's turns, between which a tool says `answer`."""
    tokenizer = make_tool_tokenizer()
    model = make_model(0, len(tokenizer))
    encoder, shown = PromptEncoder(tokenizer, PromptConfig()), _demonstrations(tokenizer, rollouts, answer)
    imitate(model, tokenizer, encoder, shown, lambda done, of: None, steps=steps, batch=_BATCH, peak=3e-3)
    return model, tokenizer


def _demonstrations(
    tokenizer: PreTrainedTokenizerFast, rollouts: Iterator[Sequence[str]], answer: str
) -> Iterator[Demonstration]:
    for number, turns in enumerate(rollouts):
        messages = [{"role": "user", "content": f"{number % 1000}?"}]
        for turn in turns:
            prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            yield Demonstration(Problem("", prompt=prompt), turn)
            messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": answer}]
