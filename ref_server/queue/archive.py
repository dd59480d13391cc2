"""A whole queue in one file, which needs no program of ours to be read: lines of JSON, and bodies as they are.

    {"format": "tandem-queue/3", "made_at": 1763823600.0}
    {"batches": {"id": …, …}, "history": [[at, state, detail], …], "body_bytes": 1234, "training_bytes": null}
    1234 bytes, then a line break; nothing where body_bytes is null. The same for training_bytes
    {"epochs": {…}}   and likewise runs, incarnations, reference, curves, metrics
    {"end": {"records": 7, "sha256": "…"}}

The digest is of all bytes before the last line. The batches are in the order of their admission. What holds only while
a server runs is left out: when leases end, and who scores a batch. Leases keep their tokens and begin anew in the store
that the file is read into, as they do when a server starts again: who still holds one goes on, others run out. A batch
that was being scored is queued.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import IO, Any

from ref_server.queue.transaction import Database, Value
from shared.api import State

FORMAT = "tandem-queue/3"
# Formats that can be imported. The first had no training_bytes, the first two no uploader.
_FORMATS = ("tandem-queue/1", "tandem-queue/2", FORMAT)
# By table: its columns, and those of them that a page goes on after.
COLUMNS: dict[str, tuple[str, ...]] = {
    "batches": (
        "id", "content_hash", "run", "lineage", "uploader", "epoch", "policy_version", "prompt_tokens",
        "completion_tokens", "completions", "payload_bytes", "admitted_at", "state", "reason", "settled_at", "scored",
        "scoring_attempts", "interruptions", "deliveries", "returned", "in_doubt", "released_token", "token",
        "consumer", "incarnation", "request_id", "lease_seconds", "started",
    ),
    "epochs": ("run", "lineage", "epoch", "fork_version"),
    "runs": ("run", "lineage", "seconds", "finished"),
    "incarnations": ("consumer", "incarnation", "seen_at"),
    "reference": ("one", "snapshot", "version", "base"),
    "curves": ("run", "lineage", "kind", "records", "bytes", "step", "first_at", "updated_at"),
    "metrics": ("run", "lineage", "kind", "step", "name", "at", "record"),
}  # fmt: skip
_KEYS = {
    "batches": ("seq",), "epochs": ("run", "lineage", "epoch"), "runs": ("run",), "incarnations": ("number",),
    "reference": ("one",), "curves": ("run", "lineage", "kind"), "metrics": ("run", "lineage", "kind", "step", "name"),
}  # fmt: skip
# Columns of the payloads, and what a record says of their lengths.
_BODIES = {"body": "body_bytes", "training": "training_bytes"}
_TRUTHS = {"scored", "returned", "in_doubt", "started", "finished"}  # SQLite has numbers for them
_PAGE = 256


class BadArchive(Exception):
    """The file is no export of a queue, or a damaged one."""


def write(db: Database, file: IO[bytes], at: float, progress: Callable[[], object]) -> int:
    """Writes all that a store holds. Returns how many records. at: Unix seconds. progress: called for each batch."""
    out = _Digested(file)
    out.line({"format": FORMAT, "made_at": at})
    for seq, row in _rows(db, "batches"):
        history = [list(event) for event in _history(db, seq)]
        if row["state"] == State.SCORING:
            row["state"] = State.QUEUED
            history.append([at, State.QUEUED, "the queue was exported while it was being scored"])
        payload = next(iter(db.rows(f"SELECT {', '.join(_BODIES)} FROM payloads WHERE seq = ?", (seq,))), (None, None))
        sizes = (None if body is None else len(body) for body in payload)
        out.line({"batches": row, "history": history, **dict(zip(_BODIES.values(), sizes, strict=True))})
        for body in payload:
            if body is not None:
                out.write(body)
                out.write(b"\n")
        progress()
    for table in list(COLUMNS)[1:]:
        for _, row in _rows(db, table):
            out.line({table: row})
    records = out.lines - 1
    out.line({"end": {"records": records, "sha256": out.digest}})
    return records


def read(db: Database, file: IO[bytes], now: float, progress: Callable[[int], object]) -> int:
    """Fills an empty store. Returns how many records. now: on the clock of its leases. progress: takes bytes read.

    Reads the file twice, first to check all of it. Raises BadArchive, before anything is stored.
    """
    for _ in _records(file):
        pass
    file.seek(0)
    records = 0
    for record, payload, size in _records(file):
        _insert(db, record, payload, now)
        progress(size)
        records += 1
    return records


def _records(file: IO[bytes]) -> Iterator[tuple[dict[str, Any], dict[str, bytes], int]]:
    """Each record with its payload, and how many bytes were read. Raises BadArchive, at the end if the digest differs.

    A payload: its columns that are not empty.
    """
    source = _Digested(file)
    header = source.record()
    if header.get("format") not in _FORMATS:
        raise BadArchive(f"it begins with {str(header)[:80]}, not with the format {FORMAT}")
    while True:
        digest = source.digest
        record = source.record()
        if "end" in record:
            if record["end"] != {"records": source.lines - 2, "sha256": digest} or file.read(1):
                raise BadArchive("it is damaged: its digest differs, or something follows its end")
            return
        sizes = {column: record.get(name) for column, name in _BODIES.items()}
        payload = {column: source.body(size) for column, size in sizes.items() if size is not None}
        yield record, payload, source.size


def is_empty(db: Database) -> bool:
    return not any(db.rows(f"SELECT 1 FROM {table} LIMIT 1", ()) for table in COLUMNS)


def _rows(db: Database, table: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The first column of each row's key, and the row; a page of them in memory."""
    columns, key = COLUMNS[table], _KEYS[table]
    names, order = ", ".join((*key, *columns)), ", ".join(key)
    beyond = f"WHERE ({order}) > ({', '.join('?' * len(key))})"
    page = db.rows(f"SELECT {names} FROM {table} ORDER BY {order} LIMIT {_PAGE}", ())
    while page:
        for values in page:
            yield (
                values[0],
                {name: _plain(name, value) for name, value in zip(columns, values[len(key) :], strict=True)},
            )
        last = tuple(page[-1][: len(key)])
        page = db.rows(f"SELECT {names} FROM {table} {beyond} ORDER BY {order} LIMIT {_PAGE}", last)


def _history(db: Database, seq: int) -> list[tuple[Any, ...]]:
    return db.rows("SELECT at, state, detail FROM events WHERE seq = ? ORDER BY number", (seq,))


def _plain(name: str, value: Any) -> Any:
    if name in _TRUTHS:
        return bool(value)
    return bytes(value).hex() if name == "content_hash" else value


def _insert(db: Database, record: dict[str, Any], payload: dict[str, bytes], now: float) -> None:
    table, row = next(iter(record.items()))
    if table == "batches":
        row.setdefault("uploader", "")
    if table not in COLUMNS or set(row) != set(COLUMNS[table]):
        raise BadArchive(f"a record is not one of {FORMAT}: {str(record)[:80]}")
    if table == "runs":
        row["heard"] = now
    if table != "batches":
        _insert_row(db, table, row)
        return
    row["content_hash"] = bytes.fromhex(row["content_hash"])
    row["expires"] = now + row["lease_seconds"] if row["state"] == State.LEASED else None
    [(seq,)] = _insert_row(db, table, row, " RETURNING seq")
    for at, state, detail in record["history"]:
        _insert_row(db, "events", {"seq": seq, "at": at, "state": state, "detail": detail})
    if payload:
        _insert_row(db, "payloads", {"seq": seq, **payload})


def _insert_row(db: Database, table: str, row: dict[str, Value], more: str = "") -> list[tuple[Any, ...]]:
    places = ", ".join("?" * len(row))
    return db.rows(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places}){more}", tuple(row.values()))


class _Digested:
    """A file that is written or read, with the digest, the bytes and the lines of JSON so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha = sha256()
        self.size = 0
        self.lines = 0

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._count(data)

    def line(self, record: dict[str, Any]) -> None:
        self.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self.lines += 1

    def record(self) -> dict[str, Any]:
        """Raises BadArchive where there is no line with an object."""
        line = self._file.readline()
        self._count(line)
        self.lines += 1
        try:
            record = json.loads(line)
        except ValueError:
            raise BadArchive(f"line {self.lines} is no JSON: it is damaged, or no export of a queue") from None
        if not isinstance(record, dict) or not record:
            raise BadArchive(f"line {self.lines} is no record")
        return record

    def body(self, size: int) -> bytes:
        data = self._file.read(size)
        self._count(data)
        end = self._file.read(1)
        self._count(end)
        if len(data) != size or end != b"\n":
            raise BadArchive(f"it is damaged: the body after line {self.lines} is not whole")
        return data

    def _count(self, data: bytes) -> None:
        self._sha.update(data)
        self.size += len(data)
