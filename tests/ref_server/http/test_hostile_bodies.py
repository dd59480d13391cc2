"""Bodies made to harm, against a server process: it refuses them, keeps its memory, and goes on."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import psutil
import pytest

from shared import wire
from shared.batch import BatchError
from tests.harness.server import Server
from tests.ref_server.calls import SAFETENSORS, Rollout, upload
from tests.ref_server.sockets import connected, head

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--max-body-mib", "32", "--max-bodies-mib", "64")
    with Server(None, tmp_path_factory.mktemp("server"), *limits) as running_server:
        yield running_server


def raw(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def tensor(shape: list[int], start: int, end: int, dtype: str = "I64") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


METADATA = {"format": "rollout-batch/1", "id": "01890a5d-ac96-774b-bcce-b302099a8057", "run": "r", "epoch": "0"}

# All kinds are in `tests/shared/test_wire.py`; these cost a server the most.
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(MIB),
    "a header of 2^63 bytes": raw(b"{}", size=2**63),
    "a header of 2^64 - 1 bytes": raw(b"{}", size=2**64 - 1),
    "300,000 tensors": raw(  # written out, since json would take seconds
        b"{"
        + b",".join(b'"reward/%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(300_000))
        + b"}"
    ),
    "1,000 tensors in a header that is small enough": raw(
        {"__metadata__": METADATA} | {f"reward/{n}": tensor([0], 0, 0, "F32") for n in range(1000)}
    ),
    "2^40 tokens in 8 bytes": raw({"prompt_ids": tensor([2**40], 0, 8)}, bytes(8)),
    "a shape whose product overflows": raw({"prompt_ids": tensor([2**32, 2**32, 2], 0, 0)}),
    "overlapping tensors": raw(
        {name: tensor([2], 0, 16) for name in ("prompt_ids", "completion_ids", "completion_lengths")}, bytes(16)
    ),
    "deep JSON": raw(b"[" * 60_000),
    "a tensor twice": raw(b'{"prompt_ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},' * 2 + b'"x":1}', bytes(8)),
    "a lone surrogate": raw(b'{"__metadata__":{"run":"\\ud800"}}'),
    "NaN for a shape": raw(b'{"prompt_ids":{"dtype":"I64","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a zip": b"PK\x03\x04" + bytes(1000),
}


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/logprobs"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_is_refused(server: Server, kind: str, path: str) -> None:
    refused = server.http.post(path, content=HOSTILE[kind], headers=SAFETENSORS)
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "invalid_batch"
    assert len(refused.content) < 2000


DEEP = {
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 200_000,
    "many lists": b'{"leases": [' + b"[]," * 340_000 + b"[]]}",
    "a long number": b'{"consumer": "c", "wait_seconds": ' + b"9" * 1_000_000 + b"}",
    "a long name": json.dumps({"consumer": "x" * 1_000_000}).encode(),
    "many completions": b'{"prompt_ids": [1], "completions": [' + b"[1]," * 250_000 + b"[1]]}",
    "many token ids": b'{"prompt_ids": [' + b"1," * 500_000 + b'1], "completions": [[1]]}',
    "no JSON": b"\xff\xfe",
}


@pytest.mark.parametrize("path", ["/v1/batches/lease", "/v1/leases/ack", "/v1/logprobs"])
@pytest.mark.parametrize("kind", DEEP)
def test_hostile_json_is_refused(server: Server, kind: str, path: str) -> None:
    refused = server.http.post(path, content=DEEP[kind], headers={"Content-Type": "application/json"})
    assert refused.status_code in (413, 422)
    assert len(refused.content) < 2000


def test_a_body_cut_short_anywhere_is_refused(server: Server, rollout: Rollout) -> None:
    body = wire.encode(rollout())
    for length in range(len(body)):
        with pytest.raises(BatchError):
            wire.decode(body[:length])
    for length in range(0, len(body), 97):
        assert upload(server.http, body[:length]).status_code == 422
    assert upload(server.http, body).status_code == 201


def test_memory_stays_bounded(server: Server) -> None:
    """Waves alike: what they need is bounded, and the last needs no more than those before, so nothing is kept.

    More than two, since how many bodies of a wave meet, and what the allocator holds on to, is chance.
    """

    def hostile(number: int) -> int:
        kinds = [bytes(32 * MIB), HOSTILE["300,000 tensors"], HOSTILE["2^40 tokens in 8 bytes"], DEEP["many lists"]]
        with httpx.Client(base_url=server.http.base_url, timeout=100) as http:
            return upload(http, kinds[number % len(kinds)]).status_code

    memory = psutil.Process(server.popen.pid).memory_info
    before, after = memory().rss, []
    for _ in range(4):
        with ThreadPoolExecutor(16) as clients:
            assert set(clients.map(hostile, range(48))) <= {422, 429}
        after.append(memory().rss)
    assert max(after) - before < 64 * MIB * 5
    assert after[-1] - max(after[:-1]) < 64 * MIB
    assert server.http.get("/readyz").status_code == 200


def test_health_routes_answer_amid_slow_clients_and_full_threads(server: Server, rollout: Rollout) -> None:
    """Two hundred bodies that never end, and more uploads at once than there are threads for them."""
    body = wire.encode(rollout())

    def upload_once() -> int:
        with httpx.Client(base_url=server.http.base_url, timeout=100) as http:
            return upload(http, body).status_code

    with ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(connected(server.http))
            lines = (f"Content-Type: {wire.CONTENT_TYPE}", "Content-Length: 1000000")
            connection.sendall(head("POST", "/v1/batches", *lines) + b"x" * 1000)
        with ThreadPoolExecutor(64) as clients:
            uploads = [clients.submit(upload_once) for _ in range(200)]
            for path in ("/livez", "/readyz") * 20:
                assert server.http.get(path).status_code == 200
            assert server.http.post("/v1/leases/extend", json={"leases": []}).status_code == 200
            assert {future.result() for future in uploads} <= {200, 201}
