"""Prometheus counters and histograms, one file for each part of the server.

Each object has a registry of its own, so that several servers can live in one process.
"""
