"""Serves the page at `/`, and its files below `/dashboard/`. Both are open: the page asks for a token itself."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.dashboard.files import read_files

_PAGE = "index.html"
# The page runs its own scripts and asks this server alone. Texts of uploaders can neither run nor load anything.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time whether its copy is the newest, so a new server is never shown by an old page.
    "Cache-Control": "no-cache",
}


def add(app: FastAPI) -> None:
    """Adds the page's two routes. The files are read here, once."""
    files = read_files()

    @requires(Role.OPEN, confines=True)
    async def show(request: Request) -> Response:
        file = files.get(request.path_params.get("name", _PAGE))
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    app.add_route("/", show, methods=["GET"], include_in_schema=False)
    app.add_route("/dashboard/{name}", show, methods=["GET"], include_in_schema=False)
