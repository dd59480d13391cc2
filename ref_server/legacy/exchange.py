"""Uploads and deliveries of the Simple-GRPO protocol, over the server's queue."""

from hashlib import sha256

import structlog
from uuid6 import uuid7

from ref_server.legacy.frame import MalformedUpload
from ref_server.legacy.payload import scored_frame, write_payload
from ref_server.legacy.upload import LegacyUpload, read_upload
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.records import Upload
from ref_server.scoring.reference import TooLarge
from ref_server.service.service import Service
from shared.api import LEGACY_RUN
from shared.batch import BatchError

log = structlog.get_logger()


class Exchange:
    """Queues uploads under a run of their own, and delivers scored batches at most once, newest first."""

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
        a frame.
        """
        try:
            body = self._service.queue.take(LEGACY_RUN)
            return None if body is None else scored_frame(body)
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
                self._service.reference.check_tokens(group)
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
