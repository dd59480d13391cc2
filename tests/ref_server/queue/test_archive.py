"""A queue in one file: all of it comes back, in either store, or nothing of a damaged one."""

import io
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import pytest

from ref_server.queue import archive
from ref_server.queue.archive import BadArchive
from ref_server.queue.errors import StorageBroken
from ref_server.queue.interface import Queue
from ref_server.queue.postgres import whole as postgres
from ref_server.queue.records import Upload, WantedReference
from ref_server.queue.sqlite import whole as sqlite
from ref_server.queue.transaction import Database
from shared.api import Key, LeaseBody, MetricsRecord, Outcome, State
from tests.ref_server.queue.backends import (
    BACKEND_NAMES,
    BACKENDS,
    Backend,
    Clock,
    PostgresBackend,
    SqliteBackend,
    make_limits,
)


@pytest.fixture(params=BACKEND_NAMES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    (tmp_path / "old").mkdir()
    with BACKENDS[request.param](tmp_path / "old") as backend:
        yield backend


@pytest.fixture(params=BACKEND_NAMES)
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    (tmp_path / "new").mkdir()
    with BACKENDS[request.param](tmp_path / "new") as backend:
        yield backend


def opened(backend: Backend) -> Any:
    return closing(backend.open(Clock(), make_limits()))


@contextmanager
def reading(backend: Backend) -> Iterator[Database]:
    if isinstance(backend, PostgresBackend):
        with postgres.reading(backend.url) as db:
            yield db
    else:
        assert isinstance(backend, SqliteBackend)
        with sqlite.reading(backend.path) as db:
            yield db


def exported(backend: Backend) -> bytes:
    file = io.BytesIO()
    with reading(backend) as db:
        archive.write(db, file, 1.0, lambda: None)
    return file.getvalue()


def imported(backend: Backend, file: bytes) -> int:
    if isinstance(backend, PostgresBackend):
        filling = postgres.filling(backend.url)
    else:
        assert isinstance(backend, SqliteBackend)
        filling = sqlite.filling(backend.path)
    with filling as (db, now):
        assert archive.is_empty(db)
        return archive.read(db, io.BytesIO(file), now, lambda size: None)


def lease(queue: Queue, **request: Any) -> Key:
    (held,) = queue.lease(LeaseBody(consumer="c", run="run", lineage="one", lease_seconds=60.0, **request))
    return Key(id=held.id, token=held.token)


def upload(id: str, *, to_score: bool = False) -> Upload:
    return Upload(id, b"." * 32, "run", 0, 0, 4, 6, 2, f"raw\n{id}\0".encode(), to_score, lineage="one")


def fill(queue: Queue) -> dict[str, Key]:
    """A batch in each state. Returns the leases: of one that goes on, and of one that is done."""
    for id in ("done", "leased", "sample", "dropped", "ready"):
        queue.put(upload(id))
    queue.drop("dropped")
    for id in ("claimed", "waiting"):
        queue.put(upload(id, to_score=True))
    done = lease(queue, epoch=1, policy_version=3, incarnation="i")
    queue.ack([done], "checkpoint-7")
    held = lease(queue, incarnation="i", request_id="r")
    sample = lease(queue, incarnation="i")
    queue.put_training("sample", b"told\n\0")
    queue.ack([sample])
    queue.extend([held], 60.0, started=True)
    assert [claim.id for claim in queue.claim(1)] == ["claimed"]
    queue.want_reference(WantedReference("run/step-2", 2, "base"))
    queue.metrics.keep("run", "one", [MetricsRecord.model_validate({"kind": "step", "step": 7, "name": "\u00e9"})])
    return {"done": done, "leased": held}


def pictures(queue: Queue) -> list[dict[str, Any]]:
    """All that clients can see of each batch, oldest first."""
    found = []
    for batch in queue.list(None, None, 100, None).batches:
        details = queue.get(batch.id)
        assert details is not None
        found.append(details.model_dump() | {"body": queue.payload(batch.id), "training": queue.training(batch.id)})
    return found


def test_all_comes_back_in_either_store(old: Backend, new: Backend) -> None:
    with opened(old) as queue:
        keys = fill(queue)
        file = exported(old)  # while it lives
        before, depths = pictures(queue), queue.stats().runs
    assert imported(new, file) > len(before)
    claimed = next(picture for picture in before if picture["id"] == "claimed")
    claimed["state"] = State.QUEUED
    claimed["history"] = [
        *claimed["history"],
        {"at": 1.0, "state": "queued", "detail": "the queue was exported while it was being scored"},
    ]
    with opened(new) as queue:
        assert pictures(queue) == before
        claimed_again = depths["run"].pop(State.SCORING)
        waiting, queued = depths["run"].pop(State.QUEUED), queue.stats().runs["run"][State.QUEUED]
        assert (queued.batches, queued.bytes) == (2, claimed_again.bytes + waiting.bytes)
        assert queue.stats().runs["run"].items() >= depths["run"].items()
        assert queue.wanted_reference() == WantedReference("run/step-2", 2, "base")
        assert [(curve.run, curve.step) for curve in queue.metrics.curves()] == [("run", 7)]
        assert len(queue.metrics.of_step("run", "one", 7)) == 1
        assert queue.ack([keys["done"]]) == [Outcome.ALREADY]
        assert lease(queue, incarnation="i", request_id="r") == keys["leased"]
        assert queue.extend([keys["leased"]], 60.0) == [Outcome.OK]
        assert queue.ack([keys["leased"]]) == [Outcome.OK]
        assert not queue.put(upload("done")).created
        assert queue.put(upload("later")).created
        assert lease(queue, incarnation="i").id == "ready"
        assert pictures(queue)[-1]["id"] == "later"


def test_a_lease_that_nobody_extends_runs_out(new: Backend, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = SqliteBackend(tmp_path / "source")
    with opened(source) as queue:
        fill(queue)
    imported(new, exported(source))
    clock = Clock()
    clock.now = 2**34  # after the time of the import, on either clock
    with closing(new.open(clock, make_limits())) as queue:
        clock.advance(61)
        assert lease(queue, incarnation="other").id == "leased"


@pytest.fixture
def file(tmp_path: Path) -> bytes:
    backend = SqliteBackend(tmp_path / "filled")
    (tmp_path / "filled").mkdir()
    with opened(backend) as queue:
        fill(queue)
    return exported(backend)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_nothing_of_a_damaged_file_is_imported(tmp_path: Path, file: bytes, place: float) -> None:
    backend, at = SqliteBackend(tmp_path), int(place * len(file))
    flipped = file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]
    for damaged in (flipped, file[:at], file[: at + 1] + file[at:], file + b"\n"):
        with pytest.raises(BadArchive):
            imported(backend, damaged)
    with reading(backend) as db:
        assert archive.is_empty(db)
    assert imported(backend, file)
    with reading(backend) as db:
        assert not archive.is_empty(db)


def test_the_form_is_plain(file: bytes) -> None:
    """Read without our code, as the documentation tells it."""
    source, bodies = io.BytesIO(file), {}
    assert json.loads(source.readline()) == {"format": "tandem-queue/3", "made_at": 1.0}
    while True:
        before = source.tell()
        record = json.loads(source.readline())
        if "end" in record:
            break
        for name in ("body_bytes", "training_bytes"):
            if record.get(name) is not None:
                bodies[record["batches"]["id"], name] = source.read(record[name])
                assert source.read(1) == b"\n"
    assert record["end"]["sha256"] == sha256(file[:before]).hexdigest()
    assert bodies["ready", "body_bytes"] == b"raw\nready\0"
    assert bodies["sample", "training_bytes"] == b"told\n\0"
    assert ("done", "body_bytes") not in bodies
    assert ("ready", "training_bytes") not in bodies


def test_a_file_of_the_first_version_is_read(tmp_path: Path, file: bytes) -> None:
    """It knows nothing of what training told, and of tokens."""
    lines = file[: file.rindex(b'{"end"')].replace(b"tandem-queue/3", b"tandem-queue/1").replace(b'"uploader":"",', b"")
    lines = (
        lines.replace(b',"training_bytes":null', b"").replace(b',"training_bytes":6', b"").replace(b"told\n\0\n", b"")
    )
    end = {"end": {"records": json.loads(file[file.rindex(b'{"end"') :])["end"]["records"]}}
    end["end"]["sha256"] = sha256(lines).hexdigest()
    backend = SqliteBackend(tmp_path)
    imported(backend, lines + json.dumps(end, separators=(",", ":")).encode() + b"\n")
    with opened(backend) as queue:
        assert queue.payload("sample") == b"raw\nsample\0"
        assert queue.training("sample") is None


def test_every_column_is_archived_or_left_out_on_purpose(tmp_path: Path) -> None:
    """A column or a table that is added is to be added to the archive, too."""
    backend = SqliteBackend(tmp_path)
    opened(backend).thing.close()
    left_out = {
        "batches": {"seq", "scorer", "expires"}, "runs": {"heard"}, "incarnations": {"number"},
    }  # fmt: skip
    with closing(apsw.Connection(str(backend.path))) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        assert tables - set(archive.COLUMNS) == {"payloads", "events", "depths", "probe"}
        for table, columns in archive.COLUMNS.items():
            found = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
            assert found - left_out.get(table, set()) == set(columns), table


def test_a_store_of_another_version_is_not_exported(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path)
    opened(backend).thing.close()
    with closing(apsw.Connection(str(backend.path))) as db:
        db.pragma("user_version", 1)
    with pytest.raises(StorageBroken, match="schema version 1"), reading(backend):
        pass
