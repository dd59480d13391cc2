"""The process of ResponseReader. It does not import PyTorch, so it starts within a second.

Requests are pickles from the parent, over a socket that no other process can reach. Answers are lines of JSON.
"""

import faulthandler
import json
import pickle
import resource
import socket
import sys
from collections.abc import Mapping
from io import BufferedRWPair
from typing import Any

import regex

from shared.process import end_with_parent

# The parent kills this process when reading takes too long. A watchdog ends it after this many time limits, in case
# the parent has died while a pattern holds the GIL.
_WATCHDOG_LIMITS = 3


def main(descriptor: int, memory: int, seconds: float) -> None:
    """Answers until the socket is closed. memory: bytes of address space, 0 for no limit. seconds: time limit."""
    end_with_parent()
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            from transformers.utils.chat_parsing import parse_response  # noqa: F401
        except ImportError:
            _send(stream, {"refused": "tools: transformers 5.15 or newer is needed to read the model's calls"})
            return
        _send(stream, {})
        while request := _receive(stream):
            faulthandler.dump_traceback_later(_WATCHDOG_LIMITS * seconds, exit=True)
            _send(stream, read(**request))
            faulthandler.cancel_dump_traceback_later()


def read(text: str, template: dict[str, Any], prefix: str, tools: list[Any], call_begins: str) -> Mapping[str, Any]:
    """message and problem, as ResponseReader.read returns them."""
    from transformers.utils.chat_parsing import parse_response

    try:
        message: Any = parse_response(text, template, prefix=prefix, tools=tools)
        json.dumps(message)
        if message.get("tool_calls"):
            return {"message": message, "problem": ""}
        reason, rest = "it does not end, or is malformed", str(message.get("content"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        message, reason, rest = {}, f"{error!s:.200}" or type(error).__name__, text
    return {"message": message, "problem": reason if regex.search(call_begins, rest) else ""}


def _receive(stream: BufferedRWPair) -> dict[str, Any] | None:
    try:
        return pickle.load(stream)
    except EOFError:
        return None


def _send(stream: BufferedRWPair, message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
