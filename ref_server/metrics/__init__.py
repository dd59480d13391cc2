"""What the server counts: Prometheus counters and histograms, one file for each part of it that counts.

Each object has a registry of its own, so that several servers can live in one process.
"""
