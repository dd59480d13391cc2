"""The command `ref-server`."""

import signal
import socket
import sys
import time
from contextlib import closing
from types import FrameType

import structlog
import uvicorn

from ref_server.app import create_app
from ref_server.config import ServeConfig
from ref_server.no_model import NoReference
from ref_server.queue.interface import StorageBroken, StorageFull
from ref_server.queue_cli.command import queue_command
from ref_server.queue_cli.options import Environment
from ref_server.reference import Reference
from ref_server.service import Service
from ref_server.stores import describe_store, open_queue
from shared.lifetime import end_with_parent
from shared.logs import configure_logs
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


class Server(uvicorn.Server):
    """uvicorn, but it says when it serves, and the first signal also sends the long polls home instead of waiting."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        log.info("serving", url=f"http://{host}:{self.config.port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)


def serve(arguments: list[str]) -> int:
    config = load_settings(ServeConfig, arguments, prog="ref-server serve", schema=Environment)
    configure_logs()
    end_with_parent()
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


def _open_reference(config: ServeConfig) -> Reference:
    if config.no_model:
        return NoReference(config.max_batch_tokens)
    from ref_server import frozen_model  # PyTorch takes seconds, and memory, which neither a queue nor its tools need

    return frozen_model.load(config)


def _listen(service: Service, config: ServeConfig) -> int:
    server = Server(
        uvicorn.Config(
            create_app(service),
            host=config.host,
            port=config.port,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # nothing here depends on who asks
            timeout_graceful_shutdown=10,
            timeout_keep_alive=60,  # longer than clients keep a connection, so that none is closed under a request
        ),
        service,
    )
    server.run()
    return 0 if server.started else 1


COMMANDS = {"serve": serve, "queue": queue_command}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] not in COMMANDS:
        print(f"ref-server: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(COMMANDS[arguments[0]](arguments[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
