"""Routes for published weights: trainers upload a version file by file and commit it, workers download it."""

import asyncio
import base64
import json
import pathlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated

from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ref_server.access.keys import Role
from ref_server.access.requirements import ANY, JSON, requires
from ref_server.http.errors import HttpError
from ref_server.http.requests import Caller, note
from ref_server.http.routes.documents import PathInteger, errors
from ref_server.service.service import Service
from ref_server.weights.catalog import Published
from ref_server.weights.errors import WeightsGone
from shared.api import CommitBody, PlainName, WeightsFile, WeightsName, WeightsVersion

_AT = "/v1/weights/{run}/{lineage}/{epoch}/{version}"
# Threads that write and hash files. The event loop only passes the bytes on.
_THREADS = 8
_PIECE_BYTES = 2**20
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_SHA256 = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/]{43}=):\s*(?=,|$)")

_Run = Annotated[PlainName, Path(description="Name of the run.")]
_File = Annotated[PlainName, Path(description="Name of the file.")]
_Seconds = Annotated[float, Query(ge=0, le=300, description="How long to wait for a newer one.")]


async def _version(
    run: _Run,
    lineage: Annotated[PlainName, Path(description="Which training of that name.")],
    epoch: PathInteger,
    version: PathInteger,
    caller: Caller,
) -> WeightsName:
    """The version that a path names. Raises Denied for a token of another run."""
    caller.only(run)
    return WeightsName(run, lineage, epoch, version)


_Version = Annotated[WeightsName, Depends(_version)]


def add(app: FastAPI, service: Service) -> None:
    _add_upload(app, service)
    _add_commit(app, service)
    _add_views(app, service)
    _add_download(app, service)


def _add_upload(app: FastAPI, service: Service) -> None:
    store, threads = service.weights.store, CapacityLimiter(_THREADS)

    @app.put(
        _AT + "/{file}", status_code=201, response_model=WeightsFile,
        openapi_extra={"requestBody": {"content": _BYTES}},
        responses={200: {"model": WeightsFile, "description": "uploaded before"}, **errors(409, 503, 507)},
    )  # fmt: skip
    @requires(Role.TRAIN, ANY, confines=True, streamed=True)
    async def upload(name: _Version, file: _File, request: Request, caller: Caller) -> Response:
        """One file of a version that will be published. It goes to the disk as it comes, whatever its length.

        201 once it is stored; 200 when the same was stored before; 409 for other content. A `Content-Digest` is
        checked. Files that are not committed within an hour after the last of them are removed.

        ```
        curl -T model.safetensors -H 'Content-Type: application/octet-stream' \\
            -H "Content-Digest: sha-256=:$(openssl dgst -sha256 -binary model.safetensors | base64):" \\
            localhost:8400/v1/weights/curl/first/0/1/model.safetensors
        ```
        """
        service.check_open()
        sha256, size = _digest(request), int(request.headers.get("content-length", 0))
        run = partial(to_thread.run_sync, limiter=threads)
        part = await run(store.begin, name, size, caller.token)
        try:
            async for piece in _pieces(request.stream()):
                await run(part.write, piece)
                store.traffic.received.inc(len(piece))
            created = await run(store.keep, name, file, part, sha256)
        finally:
            with CancelScope(shield=True):
                await run(part.discard)
        return JSONResponse(part.content.model_dump(), status_code=201 if created else 200)


def _add_commit(app: FastAPI, service: Service) -> None:
    @app.post(_AT + "/commit", response_model=WeightsVersion, responses=errors(409, 503, 507))
    @requires(Role.TRAIN, JSON, confines=True)
    async def commit(name: _Version, body: CommitBody, request: Request) -> Response:
        """Publishes a version: it becomes visible at once, if every file of it was uploaded and is right.

        Other keys than `files` are kept and returned unchanged. Committed again with the same files, the version takes
        over the other keys; with other files it answers 409. Of a run the two newest versions are kept, and those that
        are being read.

        ```
        curl localhost:8400/v1/weights/curl/first/0/1/commit -H 'Content-Type: application/json' \\
            -d '{"files": {"model.safetensors": {"bytes": '$(stat -c %s model.safetensors)', "sha256":
                "'$(sha256sum model.safetensors | cut -c -64)'"}}, "next_index": 0}'
        ```
        """
        note(request, run=name.run, epoch=name.epoch, version=name.version)
        return _answer(await run_in_threadpool(service.weights.commit, name, body.files, body.words))


def _add_views(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/weights/{run}", response_model=WeightsVersion,
        responses={204: {"description": "nothing newer came in time"}, **errors(503)},
    )  # fmt: skip
    @requires(Role.UPLOAD, confines=True)
    async def newest(
        run: _Run,
        request: Request,
        caller: Caller,
        lineage: Annotated[
            PlainName | None, Query(description="Of this training. Absent: of the one that committed last.")
        ] = None,
        after: Annotated[
            str | None, Query(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$", description="Only if newer than EPOCH.VERSION.")
        ] = None,
        wait_seconds: _Seconds = 0,
    ) -> Response:
        """The newest committed version of a run, by epoch, then version. Waits up to wait_seconds for a newer one.

        It also waits no longer when the newest is committed again, with other words.

        ```
        curl 'localhost:8400/v1/weights/curl?lineage=first&after=0.0&wait_seconds=5'
        ```
        """
        caller.only(run)
        epoch, _, version = (after or "").partition(".")
        known = (int(epoch), int(version)) if after else (-1, -1)
        gone = asyncio.ensure_future(_departure(request))
        try:
            published = await service.weights.newest(run, lineage, known, wait_seconds, request.state.holder, gone.done)
        finally:
            gone.cancel()
        return Response(status_code=204) if published is None else _answer(published)

    @app.get(_AT, response_model=WeightsVersion, responses=errors(404, 410, 503))
    @requires(Role.UPLOAD, confines=True)
    async def manifest(name: _Version) -> Response:
        """A committed version: its files with lengths and SHA-256, and what else its commit said.

        ```
        curl localhost:8400/v1/weights/curl/first/0/1
        ```
        """
        return _answer(await run_in_threadpool(service.weights.store.get, name))


def _add_download(app: FastAPI, service: Service) -> None:
    store = service.weights.store

    @app.get(
        _AT + "/{file}", response_class=Response,
        responses={
            200: {"description": "the file", "content": _BYTES},
            206: {"description": "a part of it", "content": _BYTES},
            **errors(404, 410, 416, 503),
        },
    )  # fmt: skip
    @requires(Role.UPLOAD, confines=True)
    async def download(name: _Version, file: _File) -> Response:
        """A file of a committed version. `Range` resumes a download that broke off; the ETag is the file's SHA-256.

        ```
        curl -C - -o model.safetensors localhost:8400/v1/weights/curl/first/0/1/model.safetensors
        ```
        """
        path, content = await run_in_threadpool(store.file, name, file)
        return FileDownload(path, content, store.readers.reading(name), store.traffic.sent.inc)


def _answer(published: Published) -> Response:
    return Response(json.dumps(published.view.model_dump()), media_type=JSON)


async def _departure(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes of a stream in longer pieces, each worth a turn of a thread."""
    gathered = bytearray()
    async for chunk in stream:
        gathered += chunk
        if len(gathered) >= _PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    yield bytes(gathered)


def _digest(request: Request) -> str | None:
    """The SHA-256 of the Content-Digest header (RFC 9530), in hexadecimal. None without the header."""
    header = request.headers.get("content-digest")
    if header is None:
        return None
    match = _SHA256.search(header)
    if match is None:
        message = "must be sha-256=:…:, the digest in base64 between colons, as RFC 9530 has it"
        raise HttpError(422, "invalid_request", f"Content-Digest: {message}", "Content-Digest")
    return base64.b64decode(match[1]).hex()


class FileDownload(FileResponse):
    """Takes `Range` and `If-Range`. reading: entered while the file is sent. sent: called with the bytes of each piece.

    `Repr-Digest` is the digest of the whole file, even if only a part is sent; `Content-Digest` is sent with the
    whole file only (RFC 9530).
    """

    def __init__(
        self,
        path: pathlib.Path,
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
        """Raises HttpError for a range that FileResponse would refuse as text."""
        headers = MutableHeaders(raw=message["headers"])
        if message["status"] == 200:
            headers["Content-Digest"] = self._digest
        elif message["status"] == 416:
            where = {"Content-Range": headers["content-range"]}
            raise HttpError(416, "invalid_range", "Range: must begin within the file", "Range", where)
        elif message["status"] >= 400:
            raise HttpError(422, "invalid_request", "Range: must be bytes=FIRST-LAST", "Range")
