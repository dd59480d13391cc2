"""The indexes of both stores. With them, no request reads batches that it does not need."""

INDEXES = """
CREATE INDEX batches_in_state ON batches (state, seq);
CREATE INDEX ready_fifo ON batches (returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_fifo_of_run ON batches (run, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, epoch, policy_version) WHERE state IN ('queued', 'ready');
CREATE INDEX by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX leases_by_consumer ON batches (consumer, request_id) WHERE state = 'leased';
CREATE INDEX settled ON batches (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX events_of_batch ON events (seq, number);
"""
