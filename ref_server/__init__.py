"""The reference server: scores per-token log-probs with a frozen model and queues the generated batches."""
