"""The queue on PostgreSQL: several servers score from it, several trainers lease from it.

Each method is one transaction on its own connection, so many run at once. A transaction locks the rows that it changes
and skips rows that others have locked (SKIP LOCKED). Leases and claims use the database's clock.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
import structlog
from psycopg.errors import DeadlockDetected, DiskFull, ReadOnlySqlTransaction, UndefinedTable
from psycopg_pool import ConnectionPool, PoolClosed

from ref_server.background import BackgroundLoop
from ref_server.queue import grants
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.postgres import schema
from ref_server.queue.queue import RETENTION_SECONDS, WAITING_SECONDS, Queue
from ref_server.queue.records import Claim
from ref_server.queue.transaction import Transaction, Value
from shared.api import Lease, LeaseBody, LimitsView, State

T = TypeVar("T")

log = structlog.get_logger()

_CONNECTIONS = 16
_CONNECT_SECONDS = 5.0
# A deadlocked transaction is retried: the other one has continued meanwhile.
_DEADLOCK_ATTEMPTS = 5


def database_time(db: psycopg.Connection) -> float:
    row = db.execute("SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)").fetchone()
    assert row is not None
    return row[0]


class PostgresQueue(Queue):
    """The `Queue` in the database at `url`. Creates its tables if there are none.

    claim_seconds: a server that does not renew its claims for this long loses them. upkeep_seconds: how often claims
    are renewed. clock: Unix seconds, by default the database's; tests pass their own. Raises StorageBroken when the
    database is unreachable or has an unknown schema.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: LimitsView,
        retention_seconds: float = RETENTION_SECONDS,
        max_waiting_seconds: float = WAITING_SECONDS,
        claim_seconds: float = 60.0,
        upkeep_seconds: float = 1.0,
        clock: Callable[[psycopg.Connection], float] = database_time,
    ) -> None:
        super().__init__(limits, retention_seconds, max_waiting_seconds)
        self._claim_seconds = claim_seconds
        self._upkeep_seconds = upkeep_seconds
        self._longest_pause = claim_seconds / 4  # claims must not expire because of a long pause
        self._clock = clock
        self._claims: set[str] = set()
        self._background = BackgroundLoop("claim renewal")
        self._closing = threading.Event()
        self._pool = _connect(url)
        self._upkeep = threading.Thread(target=self._keep_up, name="queue-upkeep", daemon=True)
        self._upkeep.start()

    def claim(self, max_tokens: int, reference_version: int = 0) -> list[Claim]:
        claims = super().claim(max_tokens, reference_version)
        self._claims.update(claim.id for claim in claims)
        return claims

    def lease(self, request: LeaseBody) -> list[Lease]:
        """Durable: when the database crashes its servers and their trainers live on, so a lease that it has forgotten
        would be held twice, by two consumers.
        """
        return self._run(lambda tx: grants.lease(tx, request), durable=True)

    # `complete` and `fail` stop renewing the claim even if a database crash undoes their commit: the claim then
    # expires and another server scores the batch.

    def complete(self, id: str, scores: bytes) -> None:
        super().complete(id, scores)
        self._claims.discard(id)

    def fail(self, id: str, error: str) -> State:
        state = super().fail(id, error)
        self._claims.discard(id)
        return state

    def check(self) -> None:
        super().check()
        if why := self._background.failure:
            raise StorageBroken(why)

    def close(self) -> None:
        """Closes the connections. Every later call raises StorageBroken."""
        self._closing.set()
        self._upkeep.join()
        self._pool.close()

    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T:
        for attempt in range(1, _DEADLOCK_ATTEMPTS + 1):
            try:
                with self._pool.connection() as db:
                    result, tx = self._transact(db, operation, durable)
            except DeadlockDetected as error:
                if attempt == _DEADLOCK_ATTEMPTS:
                    raise StorageBroken(f"the database is too busy: {error}") from error
            except psycopg.Error as error:
                raise storage_error(error) from error
            else:
                self.activity.add(tx.counts, tx.ready_after)
                return result
        raise AssertionError("the last attempt returns or raises")

    def _transact(
        self, db: psycopg.Connection, operation: Callable[[Transaction], T], durable: bool
    ) -> tuple[T, Transaction]:
        try:
            db.execute("SELECT set_config('synchronous_commit', %s, true)", ["on" if durable else "off"])
            now = self._clock(db)
            tx = self._begin(PostgresDatabase(db), now, now)
            result = operation(tx)
            started = time.monotonic()
            db.commit()
            if durable:
                self.activity.flushed(time.monotonic() - started, 1)
            return result, tx
        except ReadOnlySqlTransaction:
            db.close()  # after a failover this connection leads to the standby; a new one leads to the primary
            raise

    def _keep_up(self) -> None:
        """Renews this server's claims and adds up the rows of `depths`, every upkeep_seconds until close."""
        while not self._closing.wait(self._upkeep_seconds + min(self._background.pause, self._longest_pause)):
            with self._background.turn():
                try:
                    self._run(self._renew)
                    self._run(lambda tx: tx.execute(schema.ADD_UP))
                except (StorageBroken, StorageFull) as error:
                    log.warning("the database cannot be used", error=str(error))

    def _renew(self, tx: Transaction) -> None:
        """Renews the known claims. If a claim's commit was not confirmed, it expires and the batch is claimed again."""
        mine = "id = ? AND state = 'scoring' AND scorer = ?"
        for id in sorted(self._claims.copy()):
            renewed = f"UPDATE batches SET expires = ? WHERE {mine} RETURNING id"
            if not tx.rows(renewed, tx.claim_expires, id, tx.scorer):
                self._claims.discard(id)


class PostgresDatabase:
    """The `Database` of a PostgreSQL connection. Takes `?` as placeholder, as SQLite does."""

    lock = "FOR UPDATE"
    skip_locked = "FOR UPDATE SKIP LOCKED"

    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db

    def rows(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        cursor = self._db.execute(sql.replace("?", "%s").encode(), [_storable(value) for value in values])
        return cursor.fetchall() if cursor.description else []

    def check_disk(self, size: int) -> None:
        pass  # the database watches its disk

    def serialise(self, name: str) -> None:
        self._db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [_storable(f"tandem {name}")])


def _storable(value: Value) -> Value:
    """Replaces NUL in texts, which PostgreSQL cannot store."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


def configure(db: psycopg.Connection) -> None:
    """What every connection to the queue needs."""
    # A cluster created without a locale stores texts as SQL_ASCII, which psycopg would return as bytes.
    db.execute(f"SET client_encoding TO 'UTF8'; SET search_path TO {schema.SCHEMA}".encode())
    # Every query has an index in its order. Until the tables are first analysed the planner does not know their
    # sizes, and would read and sort all rows to return a few.
    db.execute("SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; SET jit = off")
    db.commit()


def _connect(url: str) -> ConnectionPool:
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # our own errors say the same
    # check: replaces connections that a restart of the database has closed, before they are used.
    pool: ConnectionPool[psycopg.Connection] = ConnectionPool(
        url, min_size=1, max_size=_CONNECTIONS, timeout=_CONNECT_SECONDS, configure=configure,
        check=ConnectionPool.check_connection, open=False,
    )  # fmt: skip
    try:
        with psycopg.connect(url, connect_timeout=int(_CONNECT_SECONDS)) as db:  # the pool's error lacks the reason
            configure(db)
            schema.prepare(db)
        pool.open(wait=True, timeout=_CONNECT_SECONDS)
    except psycopg.Error as error:
        pool.close()
        raise StorageBroken(f"the database cannot be used: {error}") from error
    return pool


def storage_error(error: psycopg.Error) -> Exception:
    """Translates a database error to StorageFull or StorageBroken. Other errors are bugs and are returned unchanged."""
    if isinstance(error, DiskFull):
        return StorageFull(f"the database's disk is full: {error}")
    if isinstance(error, PoolClosed):
        return StorageBroken("the queue is closed")
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, ReadOnlySqlTransaction, UndefinedTable)):
        return StorageBroken(f"the database cannot be used: {error}")
    return error
