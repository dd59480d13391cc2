"""Files between disk and server, in pieces: they may be larger than the memory."""

import base64
import hashlib
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
    """A download to the file `path`, perhaps in several responses, in a `with` block."""

    def __init__(self, path: Path, content: WeightsFile, name: str) -> None:
        """name: what errors call the file."""
        self._content = content
        self._name = name
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

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
            raise WrongContent(f"{self._name} is longer than its {self._content.bytes} bytes")

    def check(self) -> None:
        """Raises WrongContent unless all bytes have arrived."""
        arrived = WeightsFile(bytes=self.size, sha256=self._digest.hexdigest())
        if arrived != self._content:
            raise WrongContent(f"{self._name} has SHA-256 {arrived.sha256}, not {self._content.sha256}")
