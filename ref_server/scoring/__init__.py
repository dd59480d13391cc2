"""The reference model, and the loop that computes log-probs of batches with it."""
