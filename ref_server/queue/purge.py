"""The operator's purge in SQL: drops all batches of a choice, a slice in each transaction."""

from ref_server.queue import batches
from ref_server.queue.catalog import parse_cursor
from ref_server.queue.housekeeping import SLICE
from ref_server.queue.stored import BYTES_AT_ONCE
from ref_server.queue.transaction import Transaction
from shared.api import ListOrder, PurgeBody, Purged, State

# The most batches of the state that one call looks at, whether they are chosen or not.
LOOKED_AT = 1000


def purge(tx: Transaction, chosen: PurgeBody) -> Purged:
    """Drops the first chosen batches after the cursor. It only goes forward: dropped ones stay, in state expired."""
    after = parse_cursor(chosen.cursor, ListOrder.OLDEST)
    last, seen = _look_ahead(tx, chosen.state, after)
    found = _find(tx, chosen, after, last)
    ids: list[str] = []
    size = 0
    for seq, id, payload_bytes in found:
        if ids and size + payload_bytes > BYTES_AT_ONCE:
            break
        batches.discard(tx, seq, State(chosen.state))
        ids.append(id)
        size += payload_bytes
        after = seq
    more = len(ids) < len(found) or len(found) == SLICE
    goes_on = after if more else last if seen == LOOKED_AT else None
    return Purged(dropped=ids, bytes=size, next_cursor=None if goes_on is None else f"{goes_on:x}")


def _look_ahead(tx: Transaction, state: str, after: int) -> tuple[int, int]:
    """The last of the next batches in the state, and how many they are. Reads the index alone."""
    ahead = f"SELECT seq FROM batches WHERE state = ? AND seq > ? ORDER BY seq LIMIT {LOOKED_AT}"
    last, seen = tx.one(f"SELECT max(seq), count(*) FROM ({ahead}) AS ahead", state, after)
    return last or after, seen


def _find(tx: Transaction, chosen: PurgeBody, after: int, last: int) -> list[tuple[int, str, int]]:
    """seq, id and payload bytes of the first chosen batches between the two, at most SLICE."""
    given = {"run = ?": chosen.run, "admitted_at <= ?": chosen.admitted_until}
    given = {condition: value for condition, value in given.items() if value is not None}
    return tx.rows(
        f"SELECT seq, id, payload_bytes FROM batches "
        f"WHERE {' AND '.join(('state = ?', 'seq > ?', 'seq <= ?', 'payload_bytes > 0', *given))} "
        f"ORDER BY seq LIMIT {SLICE} {tx.db.lock}",
        chosen.state,
        after,
        last,
        *given.values(),
    )
