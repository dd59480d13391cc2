"""The reference model, and how batches come to their log-probs."""
