"""The process of ResponseReader. It does not import PyTorch, so it starts within a second."""

import json
from collections.abc import Mapping
from typing import Any

import regex

from policy_trainer.processes.user_code import serve_parent


def ready() -> Mapping[str, Any]:
    """Answers once the process can read."""
    from transformers.utils.chat_parsing import parse_response  # noqa: F401

    return {}


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


def main() -> None:
    ready()  # imports while the parent does other things
    serve_parent(ready=ready, read=read)


if __name__ == "__main__":
    main()
