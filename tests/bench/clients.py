"""Clients that upload, lease and ack batches. They use little CPU time, since they share the server's cores."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from uuid6 import uuid7

from shared import wire
from shared.batch import RolloutBatch, TokenGroup
from tests.bench import measure

_JSON = {"Content-Type": "application/json"}
_SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}
_COMPLETIONS = 8
_TOKEN_BYTES = 12  # an id of 8 and a log-prob of 4


def make_batch(size: int) -> RolloutBatch:
    """A batch of about `size` bytes as a worker uploads it."""
    length = size // (_COMPLETIONS * _TOKEN_BYTES)
    tokens = _COMPLETIONS * length
    group = TokenGroup(
        np.arange(8),
        np.random.default_rng(0).integers(0, 30_000, size=tokens),
        np.full(_COMPLETIONS, length),
    )
    return measure.batch_of(group)


class Template:
    """Encodes one batch once; each body differs only in its id."""

    def __init__(self, size: int) -> None:
        batch = make_batch(size)
        self._id = batch.id.encode()
        self._body = wire.encode(batch)

    def body(self, id: str) -> bytes:
        return self._body.replace(self._id, id.encode(), 1)


@dataclass
class Taken:
    """seconds: of all cycles together. uploads: seconds of each."""

    cycles: int
    seconds: float = 0.0
    uploads: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.cycles / self.seconds


class Clients:
    """`count` connections, each with its own thread during `cycle`."""

    def __init__(self, port: int, count: int, template: Template) -> None:
        self._template = template
        self._connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(count)]

    def cycle(self, cycles: int) -> Taken:
        """Uploads, leases and acks `cycles` batches in total, shared among the clients."""
        taken = Taken(cycles)
        left = iter(range(cycles))
        threads = [threading.Thread(target=self._work, args=(c, left, taken)) for c in self._connections]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken.seconds = time.perf_counter() - started
        assert len(taken.uploads) == cycles, "a client has failed"
        return taken

    def _work(self, connection: http.client.HTTPConnection, left: Iterator[int], taken: Taken) -> None:
        for _ in left:
            body = self._template.body(str(uuid7()))
            started = time.perf_counter()
            _post(connection, "/v1/batches", body, _SAFETENSORS, 201)
            taken.uploads.append(time.perf_counter() - started)
            leased = _post(connection, "/v1/batches/lease", b'{"consumer": "bench"}', _JSON, 200)
            key = {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}
            _post(connection, "/v1/leases/ack", json.dumps({"leases": [key]}).encode(), _JSON, 200)


def _post(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str], status: int
) -> http.client.HTTPResponse:
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == status, content
    return answer
