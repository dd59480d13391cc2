"""What tinker's client asks of a server that scores: records, and log-probs that it fetches later."""
