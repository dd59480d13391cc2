"""Sampling completions: one protocol, and its engines."""
