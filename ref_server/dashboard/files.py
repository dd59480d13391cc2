"""The files of the page, in memory."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
# Named here, since what `mimetypes` knows depends on the machine.
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class File:
    """etag: of the content, in quotes, as its header has it."""

    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, File]:
    """The page's files by name."""
    return {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, _MEDIA_TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')
