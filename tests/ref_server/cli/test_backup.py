"""`ref-server queue backup`: its messages, and backups of a server at work, which may be killed meanwhile."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite import backup
from ref_server.queue.sqlite.store import SqliteQueue
from shared import wire
from shared.api import State
from shared.batch import Batch
from tests.docs.pages import texts
from tests.harness.server import Server
from tests.ref_server.queue.backends import make_limits, postgres_backend
from tests.ref_server.queue.sqlite.test_backup import fill, pictures

Rollout = Callable[..., Batch]
Command = Callable[..., tuple[int, str, str]]
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a queue."""
    with closing(SqliteQueue(tmp_path / "data" / "queue.sqlite", limits=make_limits())) as queue:
        fill(queue)
    return tmp_path / "data"


def test_a_backup_and_a_newer_one_in_its_place(command: Command, data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        status, out, error = command("queue", "backup", str(tmp_path / "backup"), "--data-dir", str(data))
        assert (status, out, error) == (0, f"0.1 MiB in {tmp_path / 'backup'}\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "backup"}


def test_what_cannot_be_backed_up_is_explained_in_a_line(command: Command, data: Path, tmp_path: Path) -> None:
    def complaint(*arguments: str) -> str:
        status, _, error = command("queue", "backup", *arguments)
        assert status == 1
        assert error.count("\n") == 1
        return error

    target = str(tmp_path / "backup")
    assert "there is no queue at" in complaint(target, "--data-dir", str(tmp_path / "none"))
    assert "No such file" in complaint(str(tmp_path / "no" / "file"), "--data-dir", str(data))
    assert "choose a file in another directory" in complaint(str(data / "queue.sqlite"), "--data-dir", str(data))
    database = "postgresql://tandem:secret@db.example/tandem"
    assert complaint(target, "--store", database) == (
        "ref-server queue backup: the queue is on PostgreSQL: back it up with pg_dump --schema=tandem DATABASE\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


# --- The commands of docs/backup.md


def run_documented(block: str, directory: Path, **environment: str) -> None:
    """Runs a block of the page in `directory`."""
    (directory / "bin").mkdir(exist_ok=True)
    program = directory / "bin" / "ref-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ref_server "$@"\n')
    program.chmod(0o755)
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(["sh", "-euc", block], cwd=directory, check=True, env={**os.environ, **paths, **environment})


def known(queue: Queue) -> list[dict[str, object]]:
    """All that clients can see, but for what a restart changes."""
    return [batch for batch in pictures(queue) if batch["id"] != "claimed"]


@pytest.mark.slow
def test_the_documented_commands_for_sqlite(tmp_path: Path) -> None:
    path = tmp_path / ".tandem" / "queue.sqlite"
    (tmp_path / "backups").mkdir()
    with closing(SqliteQueue(path, limits=make_limits())) as queue:
        fill(queue)
        before = known(queue)
        run_documented(texts("backup.md", "sh")[0], tmp_path)
        queue.drop("ready")
    run_documented(texts("backup.md", "sh")[1], tmp_path)
    with closing(SqliteQueue(path, limits=make_limits())) as queue:
        assert known(queue) == before


@pytest.mark.slow
def test_the_documented_commands_for_postgresql(tmp_path: Path) -> None:
    with postgres_backend(tmp_path) as backend:
        with closing(PostgresQueue(backend.url, limits=make_limits())) as queue:
            fill(queue)
            before = known(queue)
            run_documented(texts("backup.md", "sh")[2], tmp_path, DATABASE=backend.url)
            queue.drop("ready")
        run_documented(texts("backup.md", "sh")[3], tmp_path, DATABASE=backend.url)
        with closing(PostgresQueue(backend.url, limits=make_limits())) as queue:
            assert known(queue) == before
            assert queue.stats().runs["run"][State.READY].batches == 1


# --- A server at work


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

    def work_until(self, acked: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.acked) < acked:
            assert time.monotonic() < deadline
            time.sleep(0.01)

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


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["that continues", "that is killed"])
def test_a_backup_of_a_server_at_work(
    tmp_path: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """killed: when the copy has begun."""
    monkeypatch.setattr(backup, "PAGES", 8)
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup"
    (new / "server").mkdir(parents=True)
    old.mkdir()
    with Server(None, old) as server:
        crew = Crew(str(server.http.base_url), rollout)
        crew.work_until(100)
        began = time.monotonic()
        progress = server.popen.kill if killed else lambda: None
        backup.back_up(old / "server" / "queue.sqlite", file, lambda done, total: progress())
        ended = time.monotonic()
        if not killed:
            crew.work_until(len(crew.acked) + 10)
            server.popen.kill()
        crew.join()
    file.rename(new / "server" / "queue.sqlite")
    with Server(None, new) as server:
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
    # A kill may come between the commit of a lease and its answer.
    tokens = {id: crew.leased[id] for id in sorted(leased & crew.leased.keys())}
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
    assert set(came) == states.keys() - done - goes_on.keys() - (leased - crew.leased.keys())


def listed(http: httpx.Client) -> Iterator[dict[str, str]]:
    cursor: dict[str, str] = {}
    while True:
        page = http.get("/v1/batches", params={"limit": 1000, **cursor}).raise_for_status().json()
        yield from page["batches"]
        if page["next_cursor"] is None:
            return
        cursor = {"cursor": page["next_cursor"]}
