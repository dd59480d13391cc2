"""The Simple-GRPO byte protocol over HTTP: a bottle application beside the server's own routes."""

from typing import Any

from a2wsgi import WSGIMiddleware
from bottle import Bottle, request, response
from fastapi import FastAPI
from starlette.routing import Route

from ref_server.access.keys import Denied, Role
from ref_server.access.requirements import ANY, requires
from ref_server.legacy.exchange import Exchange
from ref_server.legacy.frame import MalformedUpload
from ref_server.service.service import Service

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
