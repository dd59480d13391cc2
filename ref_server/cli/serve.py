"""The command `ref-server serve`."""

import time
from contextlib import closing

import structlog
from psycopg.conninfo import conninfo_to_dict

from ref_server.access.hosts import is_loopback
from ref_server.access.keys import readable_by_all
from ref_server.cli.connection import Environment
from ref_server.config import ServeConfig
from ref_server.http import server
from ref_server.http.app import create_app
from ref_server.http.listening import CannotListen, listening
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite.store import QUEUE_FILE, SqliteQueue
from ref_server.scoring.reference import NoReferenceModel, ReferenceModel
from ref_server.service.service import Service
from shared.errors import UserError
from shared.logs import configure_logs, log_uncaught_errors
from shared.process import end_with_parent, return_freed_memory
from shared.settings import load_settings

log = structlog.get_logger()


def run(arguments: list[str]) -> int:
    config = load_settings(
        ServeConfig,
        arguments,
        prog="ref-server serve",
        schema=Environment,
        file_schema=ServeConfig,
    )
    configure_logs(config.log_format, config.log_level)
    log_uncaught_errors()
    end_with_parent()
    _warn(config)
    try:
        opening = time.monotonic()
        # Both before the model, which takes long to load.
        with listening(config) as listeners, closing(open_queue(config)) as store:
            log.info("queue open", store=describe_store(config), seconds=round(time.monotonic() - opening, 3))
            service = Service(_open_reference(config), store, config)
            return server.run(create_app(service), service, listeners)
    except CannotListen as error:
        remedy = "stop what listens there, or choose others with --host, --port and --legacy-port"
        log.error("cannot listen on the address", error=str(error), remedy=remedy)
    except (StorageBroken, StorageFull) as error:
        log.error("the queue cannot be opened", error=str(error))
    except UserError as error:
        log.error("the model cannot be served", error=str(error))
    return 1


def _warn(config: ServeConfig) -> None:
    if config.token_file is not None and readable_by_all(config.token_file):
        log.warning("every user of this machine can read the tokens", file=str(config.token_file), remedy="chmod 600")
    if config.keys and config.tls_cert is None and not is_loopback(config.host):
        log.warning(
            "tokens cross the network in the clear", remedy="--tls-cert and --tls-key, or a proxy that has them"
        )


def open_queue(config: ServeConfig) -> Queue:
    """Raises StorageBroken when the store cannot be reached, is damaged, or belongs to another program."""
    bounds = {
        "limits": config.queue.limits,
        "retention_seconds": config.queue.retention_days * 86_400,
        "max_waiting_seconds": config.queue.max_waiting_days * 86_400,
    }
    if config.store == "sqlite":
        return SqliteQueue(config.data_dir / QUEUE_FILE, min_free=config.queue.min_free, **bounds)
    return PostgresQueue(config.store, **bounds)


def describe_store(config: ServeConfig) -> str:
    """Where the queue is, for people. It leaves passwords out."""
    if config.store == "sqlite":
        return f"sqlite in {config.data_dir}"
    parts = conninfo_to_dict(config.store)
    return f"postgresql {parts.get('dbname', '')} on {parts.get('host', 'this machine')}:{parts.get('port', 5432)}"


def _open_reference(config: ServeConfig) -> ReferenceModel:
    if config.no_model:
        return_freed_memory()
        return NoReferenceModel(config)
    # PyTorch takes seconds and memory; a queue without a model needs neither.
    log.info("starting PyTorch, which can take half a minute", model=config.model)
    from ref_server.scoring import frozen_model

    reference = frozen_model.load(config)
    if config.teacher is None:
        return reference
    from ref_server.scoring.teacher import add_teacher

    return add_teacher(reference, config)
