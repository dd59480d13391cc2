"""The command `ref-server`."""

import os
import signal
import sys
from types import FrameType

from shared.commands import choose_command, end_with_reader

DESCRIPTION = "The reference server: scores log-probs of tokens with a frozen model, and queues the generated batches."
COMMANDS = {
    "serve": "serve a model, or only a queue",
    "ping": "say whether a running server is ready, and with which model; for people, scripts and health checks",
    "score": "log-probs of completions from a running server, for texts, JSONL or a batch",
    "queue": "inspect and manage the queue of a running server",
}


@end_with_reader()
def main() -> None:
    signal.signal(signal.SIGTERM, _end)  # the first process of a container ignores SIGTERM unless it has a handler
    try:
        _, run = choose_command("ref-server", DESCRIPTION, COMMANDS, "ref_server.cli", sys.argv[1:])
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _end(sig: int, _: FrameType | None) -> None:
    """Ends at once: a process that does not serve yet has nothing to save, and loading a model can take minutes."""
    os._exit(128 + sig)


if __name__ == "__main__":
    main()
