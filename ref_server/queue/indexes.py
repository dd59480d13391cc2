"""The indexes of both stores. With them, no request reads batches that it does not need."""

from shared.api import Order

# Batches that may still be leased. SQLite uses an index with a condition for queries that have the same condition.
WAITING = "state IN ('queued', 'ready')"
# Settled batches that still have their payload.
KEPT = "settled_at IS NOT NULL AND payload_bytes > 0"
# Kept samples: trained batches that still have their payload.
SAMPLE = "state = 'done' AND payload_bytes > 0"

# In every order, batches that came back from a lease come first.
ORDERS = {
    Order.FIFO: "returned DESC, seq",
    Order.FRESHEST: "returned DESC, policy_version DESC, seq DESC",
}

INDEXES = f"""
CREATE INDEX ready_fifo_of_run ON batches (run, lineage, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, lineage, returned DESC, policy_version DESC, seq DESC)
    WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, lineage, epoch, policy_version) WHERE {WAITING};
CREATE INDEX leases_of_lineage ON batches (run, lineage, lease_seconds) WHERE state = 'leased';
CREATE INDEX batches_in_state ON batches (state, seq);
CREATE INDEX ready_fifo ON batches (returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX leases_by_consumer ON batches (consumer, request_id) WHERE state = 'leased';
CREATE INDEX settled ON batches (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX kept_payloads ON batches (settled_at, seq) WHERE {KEPT};
CREATE INDEX samples_of_run ON batches (run, content_hash DESC, seq DESC) WHERE {SAMPLE};
CREATE INDEX waiting_by_age ON batches (admitted_at) WHERE {WAITING};
CREATE INDEX events_of_batch ON events (seq, number);
"""
