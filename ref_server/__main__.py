"""The command `ref-server`."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType

USAGE = """usage: ref-server serve --model PATH_OR_HUB_ID | --no-model [options]
       ref-server ping | score | queue stats|ls|show|requeue|purge [options]

The reference server: scores per-token log-probs with a frozen model and queues the generated batches.

commands:
  serve    serve a model, or a queue alone; `ref-server serve --help` explains every option
  ping     say whether a running server is ready, and with which model; for people, scripts and health checks
  score    log-probs of completions by a running server: of texts, of JSONL, of a batch
  queue    look after the queue of a running server; `ref-server queue --help` lists its commands
"""


# Imports wait until a command is chosen: a health check needs no web server, and --help not even a client.
def serve(arguments: list[str]) -> int:
    from ref_server.cli.serve import serve

    return serve(arguments)


def _ping(arguments: list[str]) -> int:
    from ref_server.cli.client.ping import ping_command

    return ping_command(arguments)


def _score(arguments: list[str]) -> int:
    from ref_server.cli.client.score import score_command

    return score_command(arguments)


def _queue(arguments: list[str]) -> int:
    from ref_server.cli.queue.command import queue_command

    return queue_command(arguments)


def _end(sig: int, _: FrameType | None) -> None:
    """At once: a process that does not serve yet has nothing in hand, and loading a model can take minutes."""
    os._exit(128 + sig)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "ping": _ping,
    "score": _score,
    "queue": _queue,
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] not in COMMANDS:
        print(f"ref-server: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, _end)  # else the first process of a container would not hear it while it starts
    try:
        sys.exit(COMMANDS[arguments[0]](arguments[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
