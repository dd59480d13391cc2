"""The dashboard: serves the page at `/` and the viewer's files below `/dashboard/`.

Both need no token: the page itself asks for one.
"""

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ref_server.access.keys import Role
from ref_server.access.requirements import requires

_PAGE = "index.html"
# Listed here because the contents of `mimetypes` depend on the machine.
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# The page runs its own scripts and talks only to this server. Texts of uploaders can neither run nor load anything.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Browsers revalidate their copy each time, so an old page is never used with a new server.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """etag: hash of the content, quoted as in the header."""

    content: bytes
    media_type: str
    etag: str


def add(app: FastAPI) -> None:
    """Adds the two routes of the page. The files are read once, here."""
    contents = read_files()

    @requires(Role.OPEN, confines=True)
    async def show(request: Request) -> Response:
        file = contents.get(request.path_params.get("name", _PAGE))
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    app.add_route("/", show, methods=["GET"], include_in_schema=False)
    app.add_route("/dashboard/{name}", show, methods=["GET"], include_in_schema=False)


def read_files() -> dict[str, PageFile]:
    """The viewer's files by name."""
    paths = [path for path in (files("shared") / "viewer").iterdir() if Path(path.name).suffix in _MEDIA_TYPES]
    return {path.name: _file(path.name, path.read_bytes()) for path in paths}


def _file(name: str, content: bytes) -> PageFile:
    return PageFile(content, _MEDIA_TYPES[Path(name).suffix], f'"{sha256(content).hexdigest()[:32]}"')
