"""The durable queue of batches: one interface (`interface.py`), two stores (SQLite, PostgreSQL)."""
