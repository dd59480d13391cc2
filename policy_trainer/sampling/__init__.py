"""Sampling completions: one protocol, one file for each engine."""
