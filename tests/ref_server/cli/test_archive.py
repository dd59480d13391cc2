"""`ref-server queue export` and `import`: for people, and a restore of a server that was killed at its work."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ref_server.queue.sqlite.store import SqliteQueue
from shared import wire
from shared.batch import RolloutBatch
from tests.ref_server.processes import running
from tests.ref_server.queue.backends import make_limits, postgres_backend
from tests.ref_server.queue.test_archive import fill

Rollout = Callable[..., RolloutBatch]
Command = Callable[..., tuple[int, str, str]]
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a queue."""
    with closing(SqliteQueue(tmp_path / "data" / "queue.sqlite", limits=make_limits())) as queue:
        fill(queue)
    return tmp_path / "data"


def test_out_and_in_again(command: Command, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "queue.tandem"
    status, out, _ = command("queue", "export", str(file), "--data-dir", str(data))
    assert (status, out.split()[1]) == (0, "records,")
    assert file.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"data", "queue.tandem"}
    status, again, _ = command("queue", "import", str(file), "--data-dir", str(tmp_path / "new"))
    assert (status, again) == (0, f"{out.split()[0]} records imported\n")
    status, _, error = command("queue", "import", str(file), "--data-dir", str(tmp_path / "new"))
    assert status == 1
    assert "the store holds a queue already: give an empty one" in error


def test_what_cannot_be_is_said_in_a_line(command: Command, data: Path, tmp_path: Path) -> None:
    def complaint(*arguments: str) -> str:
        status, _, error = command("queue", *arguments)
        assert status == 1
        assert error.count("\n") == 1
        return error

    file = tmp_path / "file"
    assert "there is no queue at" in complaint("export", str(file), "--data-dir", str(tmp_path / "none"))
    assert "No such file" in complaint("export", str(tmp_path / "no" / "file"), "--data-dir", str(data))
    assert "No such file" in complaint("import", str(file), "--data-dir", str(tmp_path / "new"))
    file.write_text("no export\n")
    assert "line 1 is no JSON" in complaint("import", str(file), "--data-dir", str(tmp_path / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file", "new"]
    with closing(SqliteQueue(data / "queue.sqlite", limits=make_limits())):
        command("queue", "export", str(file), "--data-dir", str(data))
        assert "another process holds" in complaint("import", str(file), "--data-dir", str(data))


class Crew:
    """Workers and trainers that use a server until it ends, and remember what it answered, and when."""

    def __init__(self, url: str, rollout: Rollout) -> None:
        self.uploaded: dict[str, float] = {}
        self.bodies: dict[str, bytes] = {}
        self.leased: dict[str, str] = {}
        self.ack_sent: dict[str, float] = {}
        self.acked: dict[str, float] = {}
        self._url = url
        self._rollout = rollout
        self._drawing = threading.Lock()
        self._threads = [threading.Thread(target=self._until_the_end, args=(work,)) for work in
                         (self._upload, self._upload, self._train, self._train)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _until_the_end(self, work: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            try:
                while True:
                    work(http)
            except httpx.TransportError:
                return

    def _upload(self, http: httpx.Client) -> None:
        with self._drawing:
            batch = self._rollout(run="mine")
            self.bodies[batch.id] = wire.encode(batch)
        assert http.post("/v1/batches", content=self.bodies[batch.id], headers=SAFETENSORS).status_code == 201
        self.uploaded[batch.id] = time.monotonic()

    def _train(self, http: httpx.Client) -> None:
        """Acks every other batch; the others stay leased."""
        consumer = {"consumer": threading.current_thread().name, "run": "mine", "lease_seconds": 600}
        for ack in (True, False):
            answer = http.post("/v1/batches/lease", json=consumer)
            if answer.status_code != 200:
                continue
            id = answer.headers["Batch-Id"]
            self.leased[id] = answer.headers["Lease-Token"]
            if ack:
                self.ack_sent[id] = time.monotonic()
                assert outcomes(http, "ack", {id: self.leased[id]}) == ["ok"]
                self.acked[id] = time.monotonic()


def outcomes(http: httpx.Client, action: str, leases: dict[str, str]) -> list[str]:
    keys = [{"id": id, "token": token} for id, token in leases.items()]
    answer = http.post(f"/v1/leases/{action}", json={"leases": keys})
    return [result["outcome"] for result in answer.raise_for_status().json()["results"]]


@pytest.fixture(params=["sqlite", "postgresql"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield "sqlite"
        return
    with postgres_backend(tmp_path) as backend:
        yield backend.url


@pytest.mark.slow
def test_a_restore_of_a_server_that_was_killed_at_its_work(tmp_path: Path, rollout: Rollout, new_store: str) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "queue.tandem"
    old.mkdir()
    new.mkdir()
    cli = [sys.executable, "-m", "ref_server", "queue"]
    with running(old, "--no-model") as server:
        crew = Crew(str(server.http.base_url), rollout)
        deadline = time.monotonic() + 60
        while len(crew.acked) < 100:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        subprocess.run([*cli, "export", str(file), "--data-dir", str(old / "data")], check=True)
        ended = time.monotonic()
        while len(crew.acked) < 110:  # it goes on beside the export and after it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.kill()
        crew.join()
    store = ("--store", new_store)
    subprocess.run([*cli, "import", str(file), "--data-dir", str(new / "data"), *store], check=True)
    with running(new, "--no-model", *store) as server:
        check_restored(server.http, crew, began, ended)


def check_restored(http: httpx.Client, crew: Crew, began: float, ended: float) -> None:
    """Each batch is there in the right state, is known, and comes once."""
    states = {batch["id"]: batch["state"] for batch in listed(http)}
    assert {id for id, at in crew.uploaded.items() if at < began} <= states.keys() <= crew.bodies.keys()
    done = {id for id, state in states.items() if state == "done"}
    assert {id for id, at in crew.acked.items() if at < began} <= done
    assert done <= {id for id, at in crew.ack_sent.items() if at < ended}
    for id in list(states)[::10]:
        assert http.post("/v1/batches", content=crew.bodies[id], headers=SAFETENSORS).status_code == 200

    leased = {id for id, state in states.items() if state == "leased"}
    tokens = {id: crew.leased[id] for id in sorted(leased)}  # every lease that was archived had been answered
    goes_on, given_back = (dict(list(tokens.items())[half::2]) for half in (0, 1))
    assert set(outcomes(http, "ack", goes_on)) == {"ok"}
    assert set(outcomes(http, "release", given_back)) == {"ok"}
    came = []
    while True:
        answer = http.post("/v1/batches/lease", json={"consumer": "c", "run": "mine", "wait_seconds": 0})
        if answer.status_code == 204:
            break
        came.append(answer.headers["Batch-Id"])
        assert answer.content == crew.bodies[came[-1]]
    assert len(came) == len(set(came))
    assert set(came) == states.keys() - done - goes_on.keys()


def listed(http: httpx.Client) -> Iterator[dict[str, str]]:
    cursor: dict[str, str] = {}
    while True:
        page = http.get("/v1/batches", params={"limit": 1000, **cursor}).raise_for_status().json()
        yield from page["batches"]
        if page["next_cursor"] is None:
            return
        cursor = {"cursor": page["next_cursor"]}
