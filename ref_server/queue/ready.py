"""SQL queries for batches that can be leased: which a request may get, and how many there are for those that wait."""

from collections.abc import Collection, Mapping

from ref_server.queue import lineages
from ref_server.queue.in_flight import InFlight, batches_by_run
from ref_server.queue.records import Wanted
from ref_server.queue.transaction import Transaction, Value
from shared.api import LEGACY_RUN, Order

# In every order, batches that came back from a lease come first.
ORDERS = {
    Order.FIFO: "returned DESC, seq",
    Order.FRESHEST: "returned DESC, policy_version DESC, seq DESC",
}


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
    ready, in_flight = batches_by_run(tx, "ready"), InFlight(tx)
    found = {}
    for wanted, requests in waiting.items():
        if wanted.run is None or wanted.run in ready:
            most = min(requests, in_flight.room(wanted.run))
            where, values = condition(wanted)
            rows = f"SELECT 1 AS one FROM batches WHERE {where} LIMIT ?"
            found[wanted] = tx.one(f"SELECT count(*) FROM ({rows}) AS rows", *values, most) if most else 0
    return {wanted: batches for wanted, batches in found.items() if batches}
