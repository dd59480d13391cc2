"""The sandbox process: it runs rewards that may hang or crash, and its parent kills it when one hangs.

Requests are pickles from the parent, over a socket that no other process has. Answers are lines of JSON.
"""

import errno
import faulthandler
import json
import os
import pickle
import resource
import socket
import sys
import traceback
from collections.abc import Mapping
from io import BufferedRWPair
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import Any

from policy_trainer.data.sample import Reward, Sample, Score
from policy_trainer.rewards.signatures import Concurrent, ManyAtOnce, OwnReward
from policy_trainer.rewards.user_function import UserFunction
from shared.errors import UserError
from shared.lifetime import end_with_parent

# Only the end of a traceback is sent: it names the error.
_MAX_CHARACTERS = 4000
# The parent kills this process when judging takes too long. A watchdog ends it after this many time limits, in case
# the parent has died while a reward holds the GIL.
_WATCHDOG_LIMITS = 3
_TOGETHER = (Concurrent, ManyAtOnce)
# The directory of this program's own code.
_OURS = str(Path(__file__).parents[2]) + os.sep


def main(descriptor: int, memory: int, seconds: float) -> None:
    """Judges until the socket is closed. memory: bytes of address space, 0 for no limit. seconds: time limit of one
    judgement."""
    end_with_parent()
    judge = os.getpid()
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        rewards = _prepare(stream)
        while rewards and (request := _receive(stream)):
            name, samples = request
            for share in _shares(rewards[name], samples):
                faulthandler.dump_traceback_later(_WATCHDOG_LIMITS * seconds * len(share), exit=True)
                answers = _judge(rewards[name], share)
                if os.getpid() != judge:  # a reward has forked; only the original process may answer
                    os._exit(0)
                _send(stream, {"answers": answers})
                faulthandler.cancel_dump_traceback_later()


def _prepare(stream: BufferedRWPair) -> Mapping[str, Reward | OwnReward]:
    """Rewards by name, ready to judge. If one cannot be used, sends the reason and returns none."""
    try:
        rewards, preparations = pickle.load(stream)
        for prepare in preparations:
            prepare()
        loaded = {name: one.load() if isinstance(one, UserFunction) else one for name, one in rewards.items()}
    except UserError as error:
        _send(stream, {"refused": str(error)})
    except BaseException as error:  # a module may also raise SystemExit
        _send(
            stream,
            {"refused": _too_little(error) or f"rewards: one of them cannot be loaded:\n{traceback.format_exc()}"},
        )
    else:
        _send(stream, {"together": [name for name, reward in loaded.items() if isinstance(reward, _TOGETHER)]})
        return loaded
    return {}


def _too_little(error: BaseException) -> str | None:
    """The remedy, where memory was too little to load the rewards."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "judging.memory_gib: too little to load the rewards: give more, or 0 for no limit"
    return None


def _shares(reward: Reward | OwnReward, samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each judgement: of all at once, or of one."""
    return [samples] if isinstance(reward, _TOGETHER) else [[sample] for sample in samples]


def _judge(reward: Reward | OwnReward, samples: list[Sample]) -> list[dict[str, Any]]:
    """An answer for each sample."""
    try:
        outcomes = reward.outcomes(samples) if isinstance(reward, _TOGETHER) else [reward(*samples)]
    except BaseException as error:  # a user's reward may raise anything, SystemExit too
        outcomes = [error] * len(samples)
    return [_answer(reward, outcome) for outcome in outcomes]


def _answer(reward: Reward | OwnReward, outcome: Score | BaseException) -> dict[str, Any]:
    if isinstance(outcome, UserError):
        return {"refused": str(outcome)}
    if not isinstance(outcome, BaseException):
        return {"score": outcome if outcome is None else float(outcome)}
    told = own_frames(outcome) if isinstance(reward, OwnReward) else TracebackException.from_exception(outcome)
    place = [f"{frame.filename}:{frame.lineno}" for frame in told.stack[-1:]]
    lines = "".join(told.format())
    return {"error": lines[-_MAX_CHARACTERS:], "kind": " at ".join([type(outcome).__name__, *place])}


def own_frames(error: BaseException) -> TracebackException:
    """The traceback without the frames of this program, which called the user's function."""
    told = TracebackException.from_exception(error)
    part: TracebackException | None = told
    while part is not None:
        part.stack = StackSummary.from_list([frame for frame in part.stack if not frame.filename.startswith(_OURS)])
        part = part.__cause__ or part.__context__
    return told


def _receive(stream: BufferedRWPair) -> tuple[str, list[Sample]] | None:
    try:
        return pickle.load(stream)
    except EOFError:
        return None


def _send(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
