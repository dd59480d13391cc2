"""The Simple-GRPO byte protocol over HTTP and the server's queue: a bottle application with two routes."""

from hashlib import sha256
from typing import Any

import structlog
from a2wsgi import WSGIMiddleware
from bottle import Bottle, request, response
from fastapi import FastAPI
from starlette.routing import Route
from uuid6 import uuid7

from ref_server.access.keys import Denied, Role
from ref_server.access.requirements import ANY, requires
from ref_server.legacy.tensors import MalformedUpload
from ref_server.legacy.upload import LegacyUpload, read_upload, scored_frame, write_payload
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.records import Upload
from ref_server.scoring.reference import TooLarge
from ref_server.service.service import Service
from shared.api import LEGACY_RUN
from shared.batch import BatchError

log = structlog.get_logger()


class Exchange:
    """Queues uploads under one reserved run, and delivers scored batches at most once, newest first."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def upload(self, body: bytes) -> None:
        """Checks an upload and queues it durably. An upload in string mode is not kept.

        When the queue is full the oldest legacy batches are dropped: the protocol's generators do not wait. Raises
        MalformedUpload, QueueFull when there is none to drop, NotReady, StorageFull, StorageBroken.
        """
        self._service.check_open()
        upload = read_upload(body)
        if upload is None:
            return
        self._check(upload)
        displaced = self._service.queue.put_displacing(_queued(upload))
        if displaced:
            log.warning("legacy batches were dropped to make room for a newer one", ids=displaced)
        self._service.scoring.ring()

    def get(self) -> bytes | None:
        """The frame of the newest scored batch, which is then deleted; None when there is none.

        After a failure it is None, too, and the error is logged: the protocol's trainers read any answer but `empty` as
        a frame. A batch whose scores the store has lost is a failure.
        """
        try:
            taken = self._service.queue.take(LEGACY_RUN)
            if taken is None:
                return None
            if taken.scores is None:
                raise StorageBroken("the newest batch, which is now deleted, was ready without scores")
            return scored_frame(taken.body, taken.scores)
        except (StorageFull, StorageBroken, BatchError) as error:
            log.error("no legacy batch can be delivered", error=str(error))
            return None

    def _check(self, upload: LegacyUpload) -> None:
        """Raises MalformedUpload unless the reference takes all tokens."""
        most = self._service.config.max_batch_tokens
        if upload.tokens > most:  # first, since it bounds the time of making groups
            raise MalformedUpload(f"inputs have {upload.tokens} tokens to score; max_batch_tokens is {most}")
        try:
            for group in upload.groups():
                self._service.reference.check_group(group)
        except (BatchError, TooLarge) as error:
            raise MalformedUpload(f"inputs: {error}") from None


def _queued(upload: LegacyUpload) -> Upload:
    body = write_payload(upload)
    groups = upload.groups()
    return Upload(
        id=str(uuid7()),
        content_hash=sha256(body).digest(),
        run=LEGACY_RUN,
        epoch=0,
        policy_version=0,
        prompt_tokens=sum(len(group.prompt_ids) for group in groups),
        completion_tokens=sum(len(group.completion_ids) for group in groups),
        completions=sum(group.size for group in groups),
        body=body,
    )


# Uploads and deliveries at once. Reading one takes several times its length in memory.
_THREADS = 8


def add(app: FastAPI, service: Service) -> None:
    """Adds the protocol's two routes."""
    wsgi: Any = WSGIMiddleware(make_bottle(Exchange(service)), workers=_THREADS)
    upload, get = Route("/upload", wsgi, methods=["POST"]), Route("/get", wsgi, methods=["GET"])
    get.methods = {"GET"}  # Starlette adds HEAD, which would take a batch and discard it
    app.router.routes.extend([requires(Role.UPLOAD, ANY)(upload), requires(Role.TRAIN)(get)])


def make_bottle(exchange: Exchange) -> Bottle:
    """The bottle application. The server's own handlers answer all errors but a malformed upload."""
    app = Bottle()
    app.config["catchall"] = False

    def upload() -> bytes | str:
        """`tensor` once the batch is durable; 400 with the reason in plain text."""
        _refuse_browsers()
        try:
            # Not request.body: it spills to a file, and decodes a chunked transfer that the server has decoded already.
            exchange.upload(request.environ["wsgi.input"].read())
        except MalformedUpload as error:
            response.status, response.content_type = 400, "text/plain; charset=utf-8"
            return f"{error}\n"
        response.content_type = "application/octet-stream"
        return b"tensor"

    def get() -> bytes:
        """The newest scored batch, or `empty`."""
        _refuse_browsers()
        response.content_type = "application/octet-stream"
        return exchange.get() or b"empty"

    app.route("/upload", method="POST", callback=upload)
    app.route("/get", method="GET", callback=get)
    return app


def _refuse_browsers() -> None:
    """Raises Denied for browsers: a foreign page could use /get as an image's address, and the batch would be gone."""
    if request.get_header("Sec-Fetch-Site") is not None:
        raise Denied("browsers may not use this route: a batch that is read is gone", "Sec-Fetch-Site")
