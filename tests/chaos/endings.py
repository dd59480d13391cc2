"""Records the server's final state in a test's history."""

from shared.client import RefServerClient
from tests.chaos.history import History


def record_ending(history: History, url: str) -> None:
    """Records every batch with its state and reason, and the server's counts by state."""
    with RefServerClient(url) as client:
        for batch in client.batches():
            fields = {name: getattr(batch, name) for name in ("id", "run", "state", "reason", "deliveries")}
            history.record("batch", **fields)
        states = client.queue().states
    history.record("counts", states={state: depth.batches for state, depth in states.items() if depth.batches})
