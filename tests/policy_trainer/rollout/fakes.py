"""A task, a sampler and a server with known answers."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import RolloutConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import EncodedPrompt, prompt_encoder
from policy_trainer.rewards import equal_text
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.rounds import Rounds
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams
from policy_trainer.weights.published.publication import Publication
from shared.api import QueueView, State, Uploaded
from shared.batch import TokenGroup
from shared.client import RefServerError
from tests.policy_trainer.queues import queue_of
from tests.policy_trainer.rollout.sampling.whole_prompts import WholePrompts


class Counting:
    """Problem i is the text of i; its answer is i."""

    name = "counting"
    correct = ByAnswer(equal_text)
    default_rewards = ("accuracy",)

    def problem(self, index: int) -> Problem:
        return Problem(answer=str(index), prompt=str(index))

    def eval_problems(self) -> Sequence[Problem]:
        raise AssertionError


class Scripted(WholePrompts):
    """Right half of the time for problems in `mixed`, always for others; two completions each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mixed: set[int]) -> None:
        self.tokenizer = tokenizer
        self.mixed = mixed
        self.seeds: list[int] = []

    def load(self, model: Path) -> None:
        raise AssertionError

    def logps(self, group: TokenGroup) -> np.ndarray:
        raise AssertionError

    def answer_all(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.seeds.append(seed)
        numbers = [int(str(self.tokenizer.decode(prompt.ids))) for prompt in prompts]
        return [[self.answer(n), self.answer(-1 if n in self.mixed else n)] for n in numbers]

    def answer(self, number: int) -> Completion:
        ids = np.array(self.tokenizer.encode(f"<answer>{number}</answer>"))
        return Completion(ids, np.zeros(len(ids), dtype=np.float32), finished=True)


class Server:
    """Answers uploads once it is open."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.called = threading.Event()
        self.open = threading.Event()
        self.failure: Exception | None = None
        self.admitted = threading.Condition()
        self.state = State.QUEUED

    def upload(self, body: bytes) -> Uploaded:
        self.called.set()
        assert self.open.wait(60)
        if self.failure:
            raise self.failure
        with self.admitted:
            self.bodies.append(body)
            self.admitted.notify_all()
        return Uploaded(id="any", state=self.state, created=True)

    def upload_several(self, bodies: Sequence[bytes]) -> list[Uploaded | RefServerError]:
        return [self._result(body) for body in bodies]

    def _result(self, body: bytes) -> Uploaded | RefServerError:
        try:
            return self.upload(body)
        except RefServerError as error:
            return error

    def wait_for(self, count: int) -> None:
        with self.admitted:
            assert self.admitted.wait_for(lambda: len(self.bodies) >= count, timeout=60)

    def queue(self, run: str) -> QueueView:
        return queue_of(ready=len(self.bodies))


def make_rounds(
    tokenizer: PreTrainedTokenizerFast, sampler: Sampler, config: RolloutConfig, task: Task | None = None
) -> Rounds:
    task = task or Counting()
    encoder = prompt_encoder(config, tokenizer, limit=config.data.max_prompt_length)
    judge = RewardScorer(tokenizer, task, config)
    return Rounds(config, sampler, encoder, judge, task)


def publication(version: int = 0, *, epoch: int = 0, lineage: str = "") -> Publication:
    return Publication("ours", epoch, version, next_index=0, max_waiting=100, lineage=lineage)
