"""What the numbers of a batch may be: server, client and trainer refuse others, each of which could break a step."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Logits are divided by it in float32: beyond these it makes them infinite, or all equal."""

MAX_REWARD = 1e6
"""Of a reward's magnitude: squares and weighted sums of larger ones overflow float32."""

MAX_LOGP = 1e-3
"""A log-prob is at most 0; the rest is rounding."""
