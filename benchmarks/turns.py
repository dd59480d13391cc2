"""Rollouts of several turns: ours compared with TRL's loop, with tools that take their time.

A tiny model has learned to write a random number of digits, and then to call a tool or to end. Both sides sample from
it, each in a process with one thread. TRL's loop samples with transformers' generate: all rows that called a tool wait
until the slowest row of the turn has ended, and their tools are called one row after another.

idle: the share of the rows' time, from the prompt to the end of the rollout, in which they neither sample nor wait for
their tool. Where in a call of generate a row ends is taken from the number of its tokens.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks import measure
from benchmarks.sampling import EOS, PAD, cut
from policy_trainer.config import EvalConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.rollout.environments.dialogue import Dialogue
from policy_trainer.rollout.environments.response_reader import ResponseReader
from policy_trainer.rollout.environments.rollouts import Rollouts
from policy_trainer.rollout.environments.sessions import Sessions
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import RunningBatch, SamplingParams, sampling_params
from shared.models import load_model, load_tokenizer, save_model
from tests.policy_trainer.rollout.environments import trl_rollouts
from tests.policy_trainer.rollout.environments.calling_model import make_calling_model

PROMPTS, SIZE = 2, 8
# Of the tool, and how many rounds are measured.
LATENCIES = ((0.0, 8), (0.1, 4), (2.0, 1))
_CALL, _ANSWER = "<call>work{}</call>", "1"
_LONGEST, _STEPS = 25, 300
# The model has room for more; where answers do not fit, TRL's loop drops rows.
_MOST_CALLS, _MOST_TOKENS = 5, 240
_CALLING = 0.6
_VARIABLE = "TURNS_SECONDS"
# Tokens, seconds, idle share.
Figures = tuple[int, float, float]


def work() -> str:
    """Works."""
    time.sleep(float(os.environ[_VARIABLE]))
    return _ANSWER


def _rollouts() -> Iterator[Sequence[str]]:
    chance = random.Random(0)
    while True:
        turns = []
        while not turns or turns[-1].endswith(_CALL):
            digits = "".join(chance.choices("23456789", k=chance.randint(1, _LONGEST)))
            turns.append(digits + _CALL * (chance.random() < _CALLING))
        yield turns


class Side:
    """What all sides begin with."""

    def __init__(self, directory: str, seconds: float) -> None:
        os.environ[_VARIABLE] = str(seconds)
        self.model = load_model(directory, revision=None, device="cpu", dtype="float32")
        self.tokenizer = load_tokenizer(directory)
        sampling: Any = {"num_generations": SIZE, "max_completion_length": _MOST_TOKENS}
        turns: Any = {"max_tool_calling_iterations": _MOST_CALLS}
        self.config = EvalConfig(model=directory, tools=[f"{__name__}:{work.__name__}"], sampling=sampling, turns=turns)
        self.problems = [Problem("", ({"role": "user", "content": f"{number}?"},)) for number in range(PROMPTS)]
        self.encoder = PromptEncoder(self.tokenizer, self.config.data)

    def round(self, seed: int) -> Figures:
        raise NotImplementedError


class Ours(Side):
    def __init__(self, directory: str, seconds: float) -> None:
        super().__init__(directory, seconds)
        self._sampler = _Timed(self.model, self.tokenizer)
        dialogue = Dialogue(self.config, self.tokenizer, [EOS], ResponseReader(self.config.turns))
        self._rollouts = Rollouts(self.config, dialogue, Sessions(self.config))

    def round(self, seed: int) -> Figures:
        opened = self._rollouts.open(dict(enumerate(self.problems)), SIZE)
        problems = [(each, self.encoder.encode(each.problem)) for each in opened if each]
        self._sampler.seconds, began = 0.0, time.monotonic()
        groups = self._rollouts.sample(self._sampler, problems, sampling_params(self.config.sampling), seed)
        seconds = time.monotonic() - began
        talks = [each.conversation for group in groups for each in group if each.conversation]
        rows = sum(talk.seconds for talk in talks)
        tools = sum(call.seconds for talk in talks for turn in talk.calls for call in turn)
        return sum(int(talk.mask.sum()) for talk in talks), seconds, (rows - tools - self._sampler.seconds) / rows


class _Timed(HFSampler):
    """seconds: of all rows in the running batch, together."""

    seconds = 0.0

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        with super().running_batch(params, seed) as batch:
            advance = batch.advance

            def timed() -> list[tuple[int, Completion]]:
                rows, began = len(batch), time.monotonic()
                ended = advance()
                self.seconds += rows * (time.monotonic() - began)
                return ended

            batch.advance = timed
            yield batch


class Trl(Side):
    def round(self, seed: int) -> Figures:
        torch.manual_seed(seed)
        self._ends, self._busy = dict[int, float](), 0.0
        prompts = [self.encoder.encode(problem).ids for problem in self.problems for _ in range(SIZE)]
        began = time.monotonic()
        self._rows = dict.fromkeys(range(len(prompts)))  # those of the next turn, in order
        first = self._generate(prompts)
        tools: list[Any] = [({work.__name__: partial(self._work, row)}, {}) for row in range(len(prompts))]
        trl = trl_rollouts.Trl(self.tokenizer, tools, self._generate, self.config)
        _, masks = trl.run(prompts, first)
        seconds = time.monotonic() - began
        rows = sum(end - began for end in self._ends.values())
        return sum(map(sum, masks)), seconds, (rows - self._busy) / rows

    def _work(self, row: int) -> str:
        began = time.monotonic()
        self._rows[row] = None
        answer = work()
        self._busy += time.monotonic() - began
        return answer

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """As TRL's trainer does: filled on the left, until the last row has ended."""
        began, width = time.monotonic(), max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        limits: Any = {"max_new_tokens": _MOST_TOKENS, "pad_token_id": PAD, "eos_token_id": EOS}
        config = GenerationConfig(do_sample=True, top_k=0, **limits)
        with torch.inference_mode():
            output = self.model.generate(ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
        turns = [completion.ids.tolist() for completion in cut(output[:, width:])]
        step = (time.monotonic() - began) / max(map(len, turns))
        for row, turn in zip(self._rows, turns, strict=True):
            self._ends[row] = began + step * len(turn)
            self._busy += step * len(turn)
        self._rows.clear()
        return turns


_sides: dict[str, Side] = {}


def _start(make: Callable[..., Side], *arguments: Any) -> None:
    _sides["this"] = make(*arguments)


def _round(seed: int) -> Figures:
    return _sides["this"].round(seed)


def _compare(
    directory: str, title: str, sides: dict[str, tuple[Callable[..., Side], Any]], rounds: int
) -> list[list[str]]:
    """Their rounds take turns; the first warms up."""
    children = {name: measure.Child(_start, make, directory, setting) for name, (make, setting) in sides.items()}
    figures = [(name, child.call(_round, seed)) for seed in range(rounds + 1) for name, child in children.items()]
    rates, rows = {}, []
    for name, child in children.items():
        child.close()
        measured = [each for side, each in figures[len(sides) :] if side == name]
        rates[name] = sum(tokens for tokens, _, _ in measured) / sum(seconds for _, seconds, _ in measured)
        ratio, idle = next(iter(rates.values())) / rates[name], median(share for _, _, share in measured)
        rows.append([title, name, f"{rates[name]:,.0f}", f"{ratio:.2f}x", f"{idle:.1%}"])
    return rows


def run() -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_model(*make_calling_model(_rollouts(), _ANSWER, _STEPS), Path(directory))
        rows = []
        for seconds, rounds in LATENCIES:
            sides = {"ours": (Ours, seconds), "TRL's loop": (Trl, seconds)}
            rows += _compare(directory, f"a tool of {seconds:g} s", sides, rounds)
    measure.show(
        f"Rollouts of several turns, {PROMPTS} x {SIZE}, float32, one thread",
        ["", "side", "tokens/s", "the first is", "idle"],
        rows,
    )
