"""Rollouts of several turns: the model calls tools, their answers are appended, and it goes on, until it calls none.

A row that waits for its tool leaves the running batch, in which the others are sampled, and joins it again with the
answer. Tokens are only appended: what was sampled is never rendered again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, TurnsConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.conversation import CallRecord, Conversation, End
from policy_trainer.data.problem import Problem, Tools
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.environments.dialogue import UNREADABLE, Call, Dialogue
from policy_trainer.rollout.environments.response_reader import ResponseReader
from policy_trainer.rollout.environments.sessions import RESET, Session, Sessions, ToolAnswer
from policy_trainer.rollout.environments.single_answers import OnProgress, Opened, OpenProblem, nothing
from policy_trainer.rollout.sampling.sampler import RunningBatch, Sampler, SamplingParams
from shared.errors import UserError
from shared.sampling_mask import SamplingMask

# Threads that wait for tools, at most.
_MOST_THREADS = 512
# How long it waits for tools at a time.
_WAIT_SECONDS = 0.5


# A session that has been reset, and what its environment shows.
_Begun = tuple[Session, str | None]


@dataclass
class _Rollout:
    """A rollout under way. tools: those that the prompt lists. most: maximum tokens of the completion, including the
    prompt's ending. problem: its own problem, if the prompts of the group differ."""

    dialogue: Dialogue
    prompt: EncodedPrompt
    tools: Tools
    session: Session | None
    began: float
    most: int
    problem: Problem | None = None
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampling_masks: list[SamplingMask | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    calls: list[tuple[CallRecord, ...]] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    last: Completion | None = None
    end: End | None = None
    seconds: float = 0.0
    reward: float | None = None

    def append(
        self, ids: Sequence[int], logps: Sequence[float], mask: SamplingMask | None = None, *, sampled: bool
    ) -> None:
        self.sampling_masks.append(mask)
        self.lengths.append(len(ids))
        self.ids += ids
        self.logps += logps
        self.mask += [sampled] * len(ids)

    def finish(self, end: End) -> None:
        self.end = end
        self.seconds = time.monotonic() - self.began

    def completion(self) -> Completion:
        assert self.end and self.last
        conversation = Conversation(
            mask=np.array(self.mask, np.bool_),
            messages=tuple(self.messages),
            calls=tuple(self.calls),
            end=self.end,
            seconds=self.seconds,
            environment=self.session and self.session.reference,
            environment_lost=self.session is not None and self.session.lost,
            reward=self.reward,
            step_rewards=tuple(self.step_rewards),
            problem=self.problem,
        )
        ids, logps = np.array(self.ids, np.int64), np.array(self.logps, np.float32)
        sampling_mask = SamplingMask.join(self.sampling_masks, self.lengths)
        return Completion(ids, logps, self.end == "finished", self.last.eos, sampling_mask, conversation)


def open_sessions(config: CommonConfig, judge: RewardScorer, stack: ExitStack) -> Sessions | None:
    """None without tools and environments. judge: reports what fails in environments, too. stack: closes the sessions.

    Raises UserError for tools and environments that cannot be used.
    """
    if not (config.tools or config.environment):
        return None
    sessions = Sessions(config)
    stack.callback(sessions.close)
    judge.include(sessions.failures)
    return sessions


def make_rollouts(
    config: CommonConfig, sessions: Sessions | None, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> "Rollouts | None":
    """None without sessions. eos: the ids that end a turn. Raises UserError for a model that cannot call tools."""
    if sessions is None:
        return None
    return Rollouts(config, Dialogue(config, tokenizer, eos, ResponseReader(config.turns)), sessions)


class Rollouts:
    """Samples rollouts with the tools and environments of the configuration."""

    def __init__(self, config: CommonConfig, dialogue: Dialogue, sessions: Sessions) -> None:
        self._turns: TurnsConfig = config.turns
        self._seed = config.seed
        self._limit = config.sampling.max_completion_length
        self._dialogue = dialogue
        self._sessions = sessions
        self._any_was_reset = False
        self._threads = _threads()

    def open(
        self, problems: Mapping[int, Problem], size: int, on_progress: OnProgress = nothing
    ) -> list[OpenProblem | None]:
        """Resets the environments of `size` rollouts of each problem, all at once. The keys are the problems' indexes,
        for the random numbers.

        None for a problem whose environments cannot be reset, which is logged and counted. Raises UserError if no
        environment ever could be reset.
        """
        begun = [self._begin(problem, index, size) for index, problem in problems.items()]
        left = {future for futures in begun for future in futures}
        while left:
            on_progress(0)
            left = wait(left, _WAIT_SECONDS).not_done
        self._any_was_reset |= any(not future.exception() for futures in begun for future in futures)
        return [self._opened(problem, futures) for problem, futures in zip(problems.values(), begun, strict=True)]

    def sample(
        self,
        sampler: Sampler,
        problems: Opened,
        params: SamplingParams,
        seed: int,
        on_progress: OnProgress = nothing,
        *,
        in_step: bool = False,
    ) -> list[list[Completion]]:
        """num_generations completions for each problem. Their sessions stay open until `release`.

        in_step: all rows begin their next turn together, so that which rows are computed together does not depend on
        how long tools take.
        """
        size = params.num_generations
        try:
            with sampler.running_batch(params, seed) as batch:  # the device is this process's from here on
                rollouts = [each for opened, prompt in problems for each in self._rollouts(opened, prompt, params)]
                for rows in _alike(rollouts):
                    first = rollouts[rows[0]]
                    batch.add(rows, first.prompt.followed_by(first.ids), self._limit)
                self._run(batch, rollouts, on_progress, in_step)
            for reward in [self._threads.submit(self._judge, rollout) for rollout in rollouts]:
                reward.result()
        except BaseException:  # calls may be under way, which must not meet the next rollout
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = _threads()
            for session in self._sessions.used:
                session.close()
            self.release()
            raise
        completions = [rollout.completion() for rollout in rollouts]
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _rollouts(self, opened: OpenProblem, prompt: EncodedPrompt, params: SamplingParams) -> Iterator[_Rollout]:
        """The rollouts of a problem. What follows the common beginning of their prompts is in their completions."""
        size = params.num_generations
        dialogue = self._dialogue.with_variables(opened.problem.chat_template_kwargs)
        sessions, problems = opened.sessions or [None] * size, opened.problems or [None] * size
        for session, problem, ending in zip(sessions, problems, prompt.endings or [()] * size, strict=True):
            most = len(ending) + self._limit
            rollout = _Rollout(dialogue, prompt, opened.problem.tools, session, time.monotonic(), most, problem)
            rollout.append(ending, [0.0] * len(ending), sampled=False)
            yield rollout

    def release(self) -> None:
        """Gives all sessions back: rewards have judged. All at once: some may answer only when their time is over."""
        for released in [self._threads.submit(session.release) for session in self._sessions.used]:
            released.result()

    def _environment_of(self, problem: Problem) -> str | None:
        """The name of the problem's environment; empty if there is a single one, None without any."""
        names = self._sessions.environments
        if not names:
            return None
        if "" in names:
            return ""
        name = problem.extras.get("environment")
        if name not in names:
            raise UserError(
                f"environment: a row's column `environment` must be one of {', '.join(names)}, got {name!r}"
            )
        return str(name)

    def _begin(self, problem: Problem, index: int, size: int) -> list[Future[_Begun]]:
        """Starts to reset the environments of `size` rollouts; empty without one."""
        if (name := self._environment_of(problem)) is None:
            return []
        columns = {column: value for column, value in problem.extras.items() if not name or column != "environment"}
        seed = int(np.random.SeedSequence((self._seed, index)).generate_state(1)[0])
        return [self._threads.submit(self._reset_twice, name, columns, seed) for _ in range(size)]

    def _reset_twice(self, name: str, columns: Mapping[str, Any], seed: int) -> _Begun:
        """If a reset fails it is tried once more, with another session. Raises UserError if that fails, too."""
        with suppress(UserError):
            return self._reset(name, columns, seed)
        return self._reset(name, columns, seed)

    def _reset(self, name: str, columns: Mapping[str, Any], seed: int) -> _Begun:
        session = self._sessions.open(name)
        try:
            return session, session.reset(columns, seed)
        except BaseException:
            session.close()
            session.release()
            raise

    def _opened(self, problem: Problem, begun: Sequence[Future[_Begun]]) -> OpenProblem | None:
        if failure := next((error for future in begun if (error := future.exception())), None):
            if not (self._any_was_reset and isinstance(failure, UserError)):
                raise failure
            self._sessions.failures.lost(RESET, str(failure), count=len(begun), at_fault=False)
            for future in begun:
                if not future.exception():
                    future.result()[0].release()
            return None
        reset = [future.result() for future in begun]
        sessions, shown = [session for session, _ in reset], [text for _, text in reset]
        tools = tuple(self._sessions.schemas(self._environment_of(problem)))
        first, *others = [replace(_shown(problem, text), tools=tools) for text in shown or [None]]
        return OpenProblem(first, sessions, [first, *others] if len(set(shown)) > 1 else ())

    def _run(self, batch: RunningBatch, rollouts: Sequence[_Rollout], on_progress: OnProgress, in_step: bool) -> None:
        """Samples until all rollouts have ended."""
        answered: SimpleQueue[tuple[int, Future[list[int] | End]]] = SimpleQueue()
        arrived: list[tuple[int, Future[list[int] | End]]] = []
        waiting = 0
        while len(batch) or waiting:
            for row, completion in batch.advance():
                if calls := self._turn_ended(rollouts[row], completion):
                    waiting += 1
                    future = self._threads.submit(self._call, rollouts[row], calls)
                    future.add_done_callback(lambda done, row=row: answered.put((row, done)))
            on_progress(len(rollouts) - len(batch) - waiting)
            idle = len(arrived) < waiting and not len(batch)
            arrived += _arrived(answered, _WAIT_SECONDS if idle else 0)
            if in_step and (len(batch) or len(arrived) < waiting):
                continue
            waiting -= len(arrived)
            for row, future in sorted(arrived, key=itemgetter(0)):
                self._go_on(batch, row, rollouts[row], future.result())
            arrived = []

    def _turn_ended(self, rollout: _Rollout, completion: Completion) -> Sequence[Call]:
        """The calls of the turn, if the rollout goes on."""
        rollout.append(completion.ids.tolist(), completion.logps.tolist(), completion.sampling_mask, sampled=True)
        rollout.last = completion
        turn = rollout.dialogue.read(completion.ids.tolist(), rollout.tools)
        rollout.messages.append(turn.message)
        most = self._turns.max_tool_calling_iterations
        if not completion.finished:
            rollout.finish("truncated")
        elif not turn.calls:
            rollout.finish("finished")
        elif most is not None and len(rollout.calls) >= most:
            rollout.finish("out_of_turns")
        elif self._seconds_left(rollout) <= 0:
            rollout.finish("out_of_time")
        return () if rollout.end else turn.calls

    def _call(self, rollout: _Rollout, calls: Sequence[Call]) -> "list[int] | End":
        """The tokens between the turn that makes these calls and the next one; or how the rollout ends."""
        session = rollout.session or self._sessions.open(None)
        try:
            answers = [(call.name, self._answer(rollout, session, call)) for call in calls]
            if (step := session.step_reward()) is not None:
                rollout.step_rewards.append(step)
        finally:
            if rollout.session is None:
                session.release()
        rollout.calls.append(tuple(CallRecord(name, each.seconds, each.error, each.log) for name, each in answers))
        messages = [{"role": "tool", "name": name, "content": each.content} for name, each in answers]
        rollout.messages += messages
        between = rollout.dialogue.between(rollout.ids[-1], messages)
        if between is None:
            return "no_bridge"
        if len(rollout.ids) + len(between) >= rollout.most:
            return "truncated"
        if self._seconds_left(rollout) <= 0:
            return "out_of_time"
        return between

    def _answer(self, rollout: _Rollout, session: Session, call: Call) -> ToolAnswer:
        if call.arguments is None:
            return ToolAnswer(str({"error": call.problem}), 0.0, UNREADABLE)
        return session.call(call.name, call.arguments, most_seconds=self._seconds_left(rollout))

    def _go_on(self, batch: RunningBatch, row: int, rollout: _Rollout, between: "list[int] | End") -> None:
        if isinstance(between, str):
            rollout.finish(between)
            return
        rollout.append(between, [0.0] * len(between), sampled=False)
        batch.add([row], rollout.prompt.followed_by(rollout.ids), rollout.most - len(rollout.ids))

    def _judge(self, rollout: _Rollout) -> None:
        if rollout.session is not None:
            rollout.reward = rollout.session.reward()

    def _seconds_left(self, rollout: _Rollout) -> float:
        most = self._turns.rollout_seconds
        return np.inf if most is None else rollout.began + most - time.monotonic()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="tools")


def _alike(rollouts: Sequence[_Rollout]) -> list[list[int]]:
    """The rows of the rollouts, grouped by equal prompts."""
    rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, rollout in enumerate(rollouts):
        rows.setdefault((id(rollout.prompt), tuple(rollout.ids)), []).append(row)
    return [*rows.values()]


def _arrived(answered: SimpleQueue[Any], seconds: float) -> Iterator[tuple[int, Future[Any]]]:
    """The answers that have arrived. Waits at most so long for the first."""
    with suppress(Empty):
        if seconds:
            yield answered.get(timeout=seconds)
        while True:
            yield answered.get_nowait()


def _shown(problem: Problem, text: str | None) -> Problem:
    """The problem with an environment's text at the end of its last message, as in TRL."""
    if not text:
        return problem
    *earlier, last = problem.messages or ({"role": "user", "content": ""},)
    return replace(problem, messages=(*earlier, {**last, "content": last["content"] + text}), prompt="", shown=text)
