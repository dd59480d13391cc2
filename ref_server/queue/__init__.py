"""The durable queue of batches, behind one interface."""
