"""Code that the reference server and the policy trainer share, such as the batch format and the log-probs."""
