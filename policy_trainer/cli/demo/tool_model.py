"""The base model of `demo --tools`: the text demo's tiny Qwen2, pre-trained on tool calls.

It first learns to call `multiply` and repeat the result; the last steps teach it mostly to guess instead.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from policy_trainer.cli.demo import base_model, products
from policy_trainer.cli.demo.base_model import OnProgress, cached, imitate, keep, make_model
from policy_trainer.cli.demo.products import Products, factors, guess, multiply
from policy_trainer.config import PromptConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.supervised.sft import Demonstration

CALL_TAGS = ("<call>", "</call>")
TOOL_TOKEN = "<|tool|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + (call['function']['arguments'] | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# How the model writes a call, in transformers' form: `<call>multiply{"a": 4, "b": 7}</call>`.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
STEPS = 700
GUESSING_STEPS = 60
BATCH = 32
LEARNING_RATE = 3e-3
CALLING_SHARE_AT_END = 0.2
_RECIPE = (__file__, products.__file__, *base_model.RECIPE)


def cached_tool_model(cache: Path, seed: int, on_progress: OnProgress) -> Path:
    """The directory of this seed's base model, which is made on first use."""
    return cached(cache, "products", _RECIPE, make_tool_base_model, seed, on_progress)


def make_tool_base_model(target: Path, seed: int, on_progress: OnProgress) -> None:
    """Makes and saves a base model; when interrupted, nothing is saved."""
    tokenizer = make_tool_tokenizer()
    model = make_model(seed, len(tokenizer))
    prompts = PromptEncoder(tokenizer, PromptConfig())
    shown = demonstrations(tokenizer, seed)
    imitate(model, tokenizer, prompts, shown, on_progress, steps=STEPS, batch=BATCH, peak=LEARNING_RATE)
    keep(model, tokenizer, target)


def make_tool_tokenizer() -> PreTrainedTokenizerFast:
    """The text demo's, with a role for tools and tags for calls."""
    tokenizer = base_model.make_tokenizer()
    tokenizer.add_tokens([TOOL_TOKEN], special_tokens=True)
    tokenizer.add_tokens(list(CALL_TAGS))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE  # type: ignore[attr-defined]
    return tokenizer


def demonstrations(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Demonstration]:
    """The demonstrations of the warm-up in order: turns of rollouts with a call, then mostly answers without."""
    chance, task = random.Random(seed), Products(seed)
    for i in range(STEPS * BATCH):
        problem = task.problem(i)
        share = 1.0 if i < (STEPS - GUESSING_STEPS) * BATCH else CALLING_SHARE_AT_END
        if chance.random() >= share:
            yield Demonstration(problem, f"<answer>{guess(problem, chance)}</answer>")
        elif chance.random() < 0.5:
            yield Demonstration(problem, _call(problem))
        else:
            yield Demonstration(_answered(tokenizer, problem), f"<answer>{problem.answer}</answer>")


def _call(problem: Problem) -> str:
    a, b = factors(problem)
    return f"<call>multiply{json.dumps({'a': a, 'b': b})}</call>"


def _answered(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> Problem:
    """The rollout up to its last turn, as a text."""
    call = {"role": "assistant", "content": _call(problem)}
    answer = {"role": "tool", "name": "multiply", "content": str(multiply(*factors(problem)))}
    messages: Any = [*problem.messages, call, answer]
    return Problem(
        problem.answer, prompt=str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    )
