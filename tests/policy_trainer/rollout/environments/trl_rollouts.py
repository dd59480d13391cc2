"""TRL's loop of tool calls, made without its trainer's `__init__`: what samples is a function."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)
from trl.trainer.grpo_trainer import GRPOTrainer

from policy_trainer.config import CommonConfig

# Of a row, by name: the tools that are plain functions, and those that are coroutines.
RowTools = tuple[Mapping[str, Callable[..., Any]], Mapping[str, Callable[..., Any]]]


class Trl:
    """generate: the ids of prompts -> the ids of the turns that follow them. config: of the limits. counts: the calls
    of the rollouts that ran last, and how many of them failed."""

    counts: tuple[int, int]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[RowTools],
        generate: Callable[[list[list[int]]], list[list[int]]],
        config: CommonConfig,
    ) -> None:
        if not getattr(tokenizer, "response_template", None):
            tokenizer = add_response_schema(tokenizer)  # type: ignore[assignment]
        preserving = is_chat_template_prefix_preserving(tokenizer)  # type: ignore[arg-type]

        def turn(prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
            ids = generate(prompts)
            return ids, [[0.0] * len(each) for each in ids]

        most = config.turns.max_tool_calling_iterations
        self._tokenizer = tokenizer
        self._tools = [*{**rows[0][0], **rows[0][1]}.values()]
        self._trainer: Any = SimpleNamespace(
            model=SimpleNamespace(training=True, config=SimpleNamespace(max_position_embeddings=10**6)),
            _sync_tool_dicts=[plain for plain, _ in rows],
            _async_tool_dicts=[coroutines for _, coroutines in rows],
            max_tool_calling_iterations=float("inf") if most is None else most,
            max_completion_length=config.sampling.max_completion_length,
            use_vllm=False,
            _is_vlm=False,
            environment_factories=None,
            tools=self._tools,
            _tokenizer=tokenizer,
            processing_class=tokenizer,
            chat_template=None if preserving else get_training_chat_template(tokenizer),  # type: ignore[arg-type]
            chat_template_kwargs={},
            _generate_single_turn=turn,
        )
        self._trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(self._trainer, messages)

    def run(self, prompts: list[list[int]], completions: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """The ids and masks of rollouts whose first turns are `completions`."""
        parsed = [
            [parse_response(self._tokenizer, ids, prefix=prompt, tools=self._tools)]  # type: ignore[arg-type]
            for prompt, ids in zip(prompts, completions, strict=True)
        ]
        question = [[{"role": "user", "content": "q"}] for _ in prompts]
        logps = [[0.0] * len(ids) for ids in completions]
        loop = self._trainer.async_loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        mask, _, ids, _, *counts, _ = GRPOTrainer._tool_call_loop(
            self._trainer, question, prompts, completions, parsed, logps, None, {}
        )
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self.counts = (counts[0], counts[1])
        return ids, mask
