"""The command `ref-server`."""

import os
import signal
import sys
import time
from contextlib import closing
from types import FrameType

import structlog

from ref_server.app import create_app
from ref_server.auth import readable_by_all
from ref_server.client_cli.options import Environment
from ref_server.config import ServeConfig
from ref_server.hosts import is_loopback
from ref_server.listening import uvicorn_config
from ref_server.no_model import NoReference
from ref_server.queue.interface import StorageBroken, StorageFull
from ref_server.queue_cli.command import queue_command
from ref_server.reference import Reference
from ref_server.server import Server
from ref_server.service import Service
from ref_server.stores import describe_store, open_queue
from shared.lifetime import end_with_parent
from shared.logs import configure_logs, log_uncaught_errors
from shared.refusal import Refused
from shared.settings import load_settings

log = structlog.get_logger()

USAGE = """usage: ref-server serve --model PATH_OR_HUB_ID | --no-model [options]
       ref-server queue stats|ls|show|requeue|purge [options]

The reference server: scores per-token log-probs with a frozen model and queues the generated batches.

commands:
  serve    serve a model, or a queue alone; `ref-server serve --help` explains every option
  queue    look after the queue of a running server; `ref-server queue --help` lists its commands
"""


def serve(arguments: list[str]) -> int:
    config = load_settings(ServeConfig, arguments, prog="ref-server serve", schema=Environment)
    configure_logs(config.log_format, config.log_level)
    log_uncaught_errors()
    end_with_parent()
    _warn(config)
    try:
        opening = time.monotonic()
        with closing(open_queue(config)) as store:  # before the model: one that cannot be used is told at once
            log.info("queue open", store=describe_store(config), seconds=round(time.monotonic() - opening, 3))
            return _listen(Service(_open_reference(config), store, config), config)
    except (StorageBroken, StorageFull) as error:
        log.error("the queue cannot be opened", error=str(error))
    except Refused as error:
        log.error("the model cannot be served", error=str(error))
    return 1


def _warn(config: ServeConfig) -> None:
    if config.token_file is not None and readable_by_all(config.token_file):
        log.warning("every user of this machine can read the tokens", file=str(config.token_file), remedy="chmod 600")
    if config.keys and config.tls_cert is None and not is_loopback(config.host):
        log.warning(
            "tokens cross the network in the clear", remedy="--tls-cert and --tls-key, or a proxy that has them"
        )


def _open_reference(config: ServeConfig) -> Reference:
    if config.no_model:
        return NoReference(config.max_batch_tokens)
    from ref_server import frozen_model  # PyTorch takes seconds, and memory, which neither a queue nor its tools need

    return frozen_model.load(config)


def _listen(service: Service, config: ServeConfig) -> int:
    server = Server(uvicorn_config(create_app(service), config), service)
    server.run()
    return server.status


def _end(sig: int, _: FrameType | None) -> None:
    """At once: a process that does not serve yet has nothing in hand, and loading a model can take minutes."""
    os._exit(128 + sig)


COMMANDS = {"serve": serve, "queue": queue_command}


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
