"""SQL queries for batches that can be leased: which a request may get, and how many there are for those that wait."""

from collections.abc import Collection, Mapping

from ref_server.queue import lineages
from ref_server.queue.records import Wanted
from ref_server.queue.share import Share
from ref_server.queue.transaction import Transaction, Value
from shared.api import LEGACY_RUN


def condition(wanted: Wanted) -> tuple[str, list[Value]]:
    """The SQL condition of the ready batches that a request may get, and its values."""
    if wanted.run is None:
        conditions: dict[str, Value] = {"run <> ?": LEGACY_RUN}
    else:
        conditions = {"run = ?": wanted.run, "lineage = ?": wanted.lineage, "epoch <= ?": wanted.epoch}
    given = {condition: value for condition, value in conditions.items() if value is not None}
    return " AND ".join(["state = 'ready'", *given]), list(given.values())


def look(tx: Transaction, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
    for run, lineage in sorted(alive):
        lineages.hear(tx, run, lineage)
    ready, leased = _batches_by_run(tx, "ready"), _batches_by_run(tx, "leased")
    found = {}
    for wanted, requests in waiting.items():
        if wanted.run is None or wanted.run in ready:
            most = min(requests, _room(tx, wanted.run, leased))
            where, values = condition(wanted)
            rows = f"SELECT 1 AS one FROM batches WHERE {where} LIMIT ?"
            found[wanted] = tx.one(f"SELECT count(*) FROM ({rows}) AS rows", *values, most) if most else 0
    return {wanted: batches for wanted, batches in found.items() if batches}


def _batches_by_run(tx: Transaction, state: str) -> dict[str, int]:
    depths = "SELECT run, CAST(sum(batches) AS BIGINT) FROM depths WHERE state = ?"
    return dict(tx.rows(f"{depths} GROUP BY run HAVING sum(batches) > 0", state))


def _room(tx: Transaction, run: str | None, leased: Mapping[str, int]) -> int:
    """How many more batches may be leased to requests of a run, or to those that name none."""
    limits, of_all = tx.limits, sum(leased.values())
    if run is None:
        return max(0, limits.max_in_flight - of_all)
    share = Share(run, leased.get(run, 0), of_all, "batches", "are leased and not settled")
    return share.room(limits.max_in_flight, limits.max_in_flight_per_run)
