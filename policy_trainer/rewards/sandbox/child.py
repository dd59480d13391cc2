"""The sandbox process: it runs rewards that may hang or crash, and its parent kills it when one hangs.

Requests are pickles from the parent, over a socket that no other process has. Answers are lines of JSON.
"""

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
from typing import Any

from policy_trainer.data.sample import Reward, Sample
from shared.errors import UserError
from shared.lifetime import end_with_parent

# Only the end of a traceback is sent: it names the error.
_MAX_CHARACTERS = 4000
# The parent kills this process when judging takes too long. A watchdog ends it after this many time limits, in case
# the parent has died while a reward holds the GIL.
_WATCHDOG_LIMITS = 3


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
            for sample in samples:
                faulthandler.dump_traceback_later(_WATCHDOG_LIMITS * seconds, exit=True)
                answer = _judge(rewards[name], sample)
                if os.getpid() != judge:  # a reward has forked; only the original process may answer
                    os._exit(0)
                _send(stream, answer)
                faulthandler.cancel_dump_traceback_later()


def _prepare(stream: BufferedRWPair) -> Mapping[str, Reward]:
    """Rewards by name, ready to judge. If one cannot be used, sends the reason and returns none."""
    try:
        rewards, preparations = pickle.load(stream)
        for prepare in preparations:
            prepare()
    except UserError as error:
        _send(stream, {"refused": str(error)})
    except MemoryError:
        _send(stream, {"refused": "judging.memory_gib: too little to load the rewards: give more, or 0 for no limit"})
    except BaseException:  # a module may also raise SystemExit
        _send(stream, {"refused": f"rewards: one of them cannot be loaded:\n{traceback.format_exc()}"})
    else:
        _send(stream, {"ready": True})
        return rewards
    return {}


def _judge(reward: Reward, sample: Sample) -> dict[str, Any]:
    try:
        return {"score": float(reward(sample))}
    except UserError as error:
        return {"refused": str(error)}
    except BaseException:  # a user's reward may raise anything, SystemExit too
        return {"error": traceback.format_exc()[-_MAX_CHARACTERS:]}


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
