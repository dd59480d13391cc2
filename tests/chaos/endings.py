"""What the server says at the end of a test, put into its history."""

from typing import Any

import httpx

from tests.chaos.history import History

_PAGE = 1000


def record_ending(history: History, url: str) -> None:
    """Every batch with its state and reason, and the counts that the server keeps of them."""
    with httpx.Client(base_url=url, timeout=60) as client:
        cursor: str | None = None
        while True:
            page = _get(client, "/v1/batches", limit=_PAGE, **({"cursor": cursor} if cursor else {}))
            for batch in page["batches"]:
                fields = {name: batch[name] for name in ("id", "run", "state", "reason", "deliveries")}
                history.record("batch", **fields)
            cursor = page["next_cursor"]
            if cursor is None:
                break
        states = _get(client, "/v1/queue")["states"]
    history.record("counts", states={state: depth["batches"] for state, depth in states.items() if depth["batches"]})


def _get(client: httpx.Client, path: str, **params: Any) -> Any:
    return client.get(path, params=params).raise_for_status().json()
