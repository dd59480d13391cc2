"""Files between disk and server, in pieces: they may be larger than the memory."""

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from shared.api import WeightsFile
from shared.client.errors import WrongContent

_PIECE_BYTES = 2**20


def describe_file(path: Path) -> WeightsFile:
    """Length and SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return WeightsFile(bytes=file.tell(), sha256=digest)


def content_digest(content: WeightsFile) -> str:
    """The Content-Digest header (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(content.sha256)).decode()}:"


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a MiB at a time."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


class WeightsDownload:
    """A download to `target`, perhaps in several responses. The file gets its name when it is complete and correct.

    Use it in a `with` block, which removes an incomplete file.
    """

    def __init__(self, target: Path, content: WeightsFile) -> None:
        self._target = target
        self._content = content
        self._path = target.with_name(f".{target.name}.part")
        self._file = self._path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    @property
    def headers(self) -> dict[str, str]:
        """Request headers for the missing bytes, provided that the file is still the same."""
        if not self.size:
            return {}
        return {"Range": f"bytes={self.size}-", "If-Range": f'"{self._content.sha256}"'}

    def begin(self, response: httpx.Response) -> None:
        """Prepares for the bytes of an answer. Raises ValueError, LookupError if they are not those requested."""
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            self._file.seek(0)
            self._file.truncate()
            self._digest, self.size = hashlib.sha256(), 0
        elif not response.headers["Content-Range"].startswith(f"bytes {self.size}-"):
            raise ValueError(f"bytes from {self.size} on were requested, got {response.headers['Content-Range']}")

    def write(self, piece: bytes) -> None:
        """Raises WrongContent for more bytes than the file has, OSError."""
        self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)
        if self.size > self._content.bytes:
            raise WrongContent(f"{self._target.name} is longer than its {self._content.bytes} bytes")

    def finish(self) -> None:
        """Gives the file its name, once its bytes are on the disk. Raises WrongContent, OSError."""
        arrived = WeightsFile(bytes=self.size, sha256=self._digest.hexdigest())
        if arrived != self._content:
            raise WrongContent(f"{self._target.name} has SHA-256 {arrived.sha256}, not {self._content.sha256}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.replace(self._target)
