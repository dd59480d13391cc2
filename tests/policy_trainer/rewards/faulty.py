"""A user's reward functions, each with a fault. Imported by name."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any


def hanging(completion: str) -> float:
    """Only a kill ends it: it holds the interpreter lock."""
    if completion == "hang":
        sum(range(10**15))
    return len(completion)


def sleeping(completion: str) -> float:
    while completion == "hang":
        time.sleep(0.001)
    return len(completion)


def leaving(completion: str) -> float:
    if completion == "leave":
        os._exit(3)
    if completion == "exit":
        sys.exit(3)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(completion)


def greedy(completion: str) -> float:
    hoard = []
    while completion == "hoard":
        hoard.append(bytearray(2**24))
    return len(completion)


def raising(completion: str) -> float:
    if completion.startswith("raise"):
        raise RuntimeError("it was asked to")
    return len(completion)


def breaking(completion: str) -> float:
    """Breaks what the next call needs."""
    sockets = [each for each in range(3, 12) if os.path.exists(f"/proc/self/fd/{each}") and _is_socket(each)]
    if completion == "close stdout":
        sys.stdout.close()
        sys.stderr.close()
    elif completion == "cover descriptors":
        for place in (1, 2):
            os.dup2(os.open("/dev/null", os.O_WRONLY), place)
    elif completion in ("stray line", "garbage"):
        for each in sockets:
            os.write(each, b'{"answers": [{"score": 9}]}\n' if completion == "stray line" else b"garbage")
    elif completion == "print much":
        print("x" * 10_000_000)
    elif completion == "write much":
        subprocess.run(["head", "-c", "10000000", "/dev/zero"], check=True)
    else:
        print("judged", completion)
    return len(completion)


def _is_socket(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket")


def counting_secrets(completion: str) -> float:
    return sum(value == "secret" for value in os.environ.values())


def starting(completion: str) -> float:
    """Starts a process in a session of its own. Returns a tenth of its pid: the pid may be too large for a reward."""
    return subprocess.Popen(["sleep", "1005"], start_new_session=True).pid / 10


def always_raising(**known: Any) -> float:
    raise RuntimeError("there is nothing to be had")


def unanswering(completion: str) -> Any:
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1", "list": [1]}.get(completion, 1)


def silent(completion: str) -> None:
    """Judges nothing."""


def talking(completion: str) -> float:
    print("on standard output:", completion)
    return len(completion)


def seeing(**known: Any) -> float:
    """Whether it gets all arguments, in a process without PyTorch."""
    expected = {
        "completion": "said",
        "answer": "2",
        "prompt": "",
        "messages": [{"role": "user", "content": "1+1=?"}],
        "tokens": 7,
        "finished": False,
        "numbers": (1, 1),
    }
    logging = known.pop("log_metric"), known.pop("log_extra")
    return float(known == expected and all(map(callable, logging)) and "torch" not in sys.modules)


def forking(completion: str) -> float:
    """Returns twice."""
    return -1.0 if completion == "fork" and os.fork() == 0 else len(completion)


def wanting(completion: str, nosuch: int) -> float:
    return nosuch


def by_position(completion: str, /) -> float:
    return len(completion)


def choosing(numbers: Any, answer: str, beyond: int = 5) -> float:
    return len(numbers) + int(answer) + beyond


def together(prompts: Any, completions: Any, completion_ids: Any, hint: Any, **columns: Any) -> list[float | None]:
    """One call for all; the rewards are the number of completions."""
    texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
    if "hang" in texts:
        time.sleep(1000)
    if "raise" in texts:
        raise RuntimeError("it was asked to")
    if "short" in texts:
        return [0.0]
    return [None if text == "none" else float(len(texts)) for text in texts]


async def together_async(completions: Any, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [1.0] * len(completions)


async def one_async(completion: str) -> float:
    """Waits for all other calls: one after the other they would wait forever."""
    global waiting
    waiting += 1
    while waiting < 3:
        await asyncio.sleep(0.001)
    if completion == "raise":
        raise RuntimeError("it was asked to")
    return len(completion)


waiting = 0


def as_trl_calls(
    prompts: Any, completions: Any, completion_ids: Any, answer: Any, hint: Any, **rest: Any
) -> list[float]:
    """Whether it gets all arguments in TRL's form."""
    question, text = [{"role": "user", "content": "1+1=?"}], "1+1="
    right = (
        prompts == [question, question, text]
        and completions == [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}], "c"]
        and completion_ids == [[5], [6, 7], [8]]
        and answer == [2, 2, None]
        and hint == ["h", None, None]
        and rest.pop("finished") == [True, True, False]
        and sorted(rest) == ["log_extra", "log_metric"]
    )
    return [float(right)] * 3


def process(completion: str) -> float:
    """The id of the process. It takes a moment, so that others take part."""
    time.sleep(0.05)
    return float(os.getpid())


def raising_twice(completion: str) -> float:
    if completion == "first":
        raise RuntimeError("one fault")
    return float({}[completion])


not_a_function = 5
