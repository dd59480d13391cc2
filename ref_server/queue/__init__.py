"""The durable queue of batches: its promises in `queue.py`, its stores in `sqlite/` and `postgres/`."""
