"""Answers a file in small pieces, which count as no memory, with its digests."""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fastapi.responses import FileResponse
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ref_server.http.problem import Problem
from ref_server.weights.errors import WeightsGone
from shared.api import WeightsFile


class Download(FileResponse):
    """Takes `Range` and `If-Range`. reading: entered while the file is sent. sent: called with the bytes of each piece.

    `Repr-Digest` is of the whole file, also beside a part of it; `Content-Digest` stands beside the whole (RFC 9530).
    """

    def __init__(
        self,
        path: Path,
        content: WeightsFile,
        reading: AbstractContextManager[None],
        sent: Callable[[int], None],
    ) -> None:
        digest = f"sha-256=:{base64.b64encode(bytes.fromhex(content.sha256)).decode()}:"
        headers = {"ETag": f'"{content.sha256}"', "Repr-Digest": digest}
        super().__init__(path, headers=headers, media_type="application/octet-stream")
        self._digest = digest
        self._reading = reading
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
            self._sent(len(message.get("body", b"")))
            await send(message)

        with self._reading:
            try:
                await super().__call__(scope, receive, count)
            except (FileNotFoundError, RuntimeError) as error:  # FileResponse raises one of them before it begins
                raise WeightsGone("this version is being removed; there is a newer one") from error

    def _begin(self, message: Message) -> None:
        """Raises Problem for a range that FileResponse would refuse as text."""
        headers = MutableHeaders(raw=message["headers"])
        if message["status"] == 200:
            headers["Content-Digest"] = self._digest
        elif message["status"] == 416:
            where = {"Content-Range": headers["content-range"]}
            raise Problem(416, "invalid_range", "Range: must begin within the file", "Range", where)
        elif message["status"] >= 400:
            raise Problem(422, "invalid_request", "Range: must be bytes=FIRST-LAST", "Range")
