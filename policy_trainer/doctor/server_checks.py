"""Checks of the reference server: the one that is named, or the one that `train` would start itself."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from policy_trainer.config import ENV_PREFIX, INLINE, TrainConfig
from policy_trainer.doctor.findings import Finding, ok, warning, wrong
from policy_trainer.doctor.subject import Served, Subject
from policy_trainer.queue_client.matching import check_server
from policy_trainer.queue_client.server import connect, token_of
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.reference_servers import ReferenceServer, choose_server
from shared.api import QueueView, State
from shared.client import ClientError, RefServerClient, RefServerError
from shared.client.credentials import remedy
from shared.errors import UserError

# How long a server that is named may take to answer.
_PATIENCE_SECONDS = 15.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def server(subject: Subject) -> Iterator[Finding]:
    """Starts a server where `train` would; it serves the later checks, too.

    Raises UserError for one that does not suit the run, RunFailed for one that dies.
    """
    directory = RunDirectory(subject.directory / "reference")
    config = subject.config.model_copy(update={"run_dir": directory.root})
    own = choose_server(config, directory, note=lambda text: None)
    subject.stack.callback(own.stop)
    own.start(lambda reason, seconds: None)
    wait = partial(_wait, subject.config, own)
    own.await_answer(wait)
    client = connect(config, own.url, wait)
    subject.stack.callback(client.close)
    try:
        model, queue = check_server(client, subject.config, subject.outline, subject.tokenizer)
    except ClientError as error:
        raise UserError(f"server: {error}{remedy(error, ENV_PREFIX)}") from None
    subject.served = Served(client, model, token_of(config))
    yield from _described(subject.config, subject.served, queue)


def _wait(config: TrainConfig, own: ReferenceServer, reason: str, seconds: float) -> None:
    own.check()
    if config.server != INLINE and seconds > _PATIENCE_SECONDS:
        raise UserError(f"server: {reason}")


def _described(config: TrainConfig, served: Served, queue: QueueView) -> Iterator[Finding]:
    client, model = served.client, served.model
    if reason := client.not_ready_reason():
        yield wrong(f"{client.url} would not score a batch now: {reason}", "see its log, and wait until it is ready")
        return
    url = urlsplit(client.url)
    whose = "its own" if config.server == INLINE else "with TLS" if url.scheme == "https" else "without TLS"
    scores = f"scores with {model.name} ({model.dtype} on {model.device})" if model.name else "has no model"
    waiting = sum(queue.states[state].batches for state in (State.QUEUED, State.SCORING, State.READY))
    yield ok(f"{client.url}, {whose}: {scores}; the token may train; {waiting} batches wait in the queue")
    if url.scheme == "http" and url.hostname not in _LOOPBACK and (config.token or config.token_file):
        yield warning(
            "the token goes unencrypted to another machine", "give the server --tls-cert and --tls-key, use https://"
        )


def leave_nothing(client: RefServerClient, run: str, lineage: str) -> None:
    """Ends a run on the server and drops its batches. A token that may not drop leaves expired ones: they are the first
    to go when room is needed."""
    with suppress(ClientError):
        client.finish_run(run, lineage)
        for batch in client.batches(run=run):
            with suppress(RefServerError):  # a role that may not, or a batch that is being scored
                client.drop(batch.id)
