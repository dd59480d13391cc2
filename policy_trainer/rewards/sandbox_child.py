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
from typing import Any

from policy_trainer.data.problem import Sample
from policy_trainer.lifecycle.user_output import UserOutput
from policy_trainer.rewards.functions import RewardFunction, load_function
from shared.errors import UserError
from shared.process import end_with_parent

# The parent kills this process when judging takes too long. A watchdog ends it after this many time limits, in case
# the parent has died while a reward holds the GIL.
_WATCHDOG_LIMITS = 3


def main(descriptor: int, memory: int, seconds: float) -> None:
    """Judges until the socket is closed. memory: bytes of address space, 0 for no limit. seconds: time limit of one
    judgement."""
    end_with_parent()
    pid, output = os.getpid(), UserOutput()
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        rewards = _prepare(stream)
        while rewards and (request := _receive(stream)):
            first, name, samples = request
            for number, call in enumerate(rewards[name].split(samples), first):
                output.begin()
                limit = _WATCHDOG_LIMITS * seconds * len(call)
                faulthandler.dump_traceback_later(limit, exit=True, file=output.descriptor)
                answers = rewards[name].answers(call)
                if os.getpid() != pid:  # a reward has forked; only the original process may answer
                    os._exit(0)
                _send(stream, {"number": number, "answers": answers})
                faulthandler.cancel_dump_traceback_later()


def _prepare(stream: BufferedRWPair) -> Mapping[str, RewardFunction]:
    """Rewards by name, ready to judge. If one cannot be used, sends the reason and returns none."""
    try:
        rewards, preparations = pickle.load(stream)
        for prepare in preparations:
            prepare()
        loaded = {
            name: load_function(reward) if isinstance(reward, str) else RewardFunction(name, reward, "sample")
            for name, reward in rewards.items()
        }
    except UserError as error:
        _send(stream, {"refused": error.args})
    except BaseException as error:  # a module may also raise SystemExit
        reason = f"rewards: one of them cannot be loaded:\n{traceback.format_exc()}"
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            reason = "judging.memory_gib: too little to load the rewards: give more, or 0 for no limit"
        _send(stream, {"refused": [reason]})
    else:
        _send(stream, {"together": [name for name, reward in loaded.items() if reward.judges_together]})
        return loaded
    return {}


def _receive(stream: BufferedRWPair) -> tuple[int, str, list[Sample]] | None:
    try:
        return pickle.load(stream)
    except EOFError:
        return None


def _send(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    # The newline ends a line that a function may have written to the socket.
    stream.write(b"\n" + json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
