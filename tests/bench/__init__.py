"""Speed, memory and exactness, as ratios: `python -m tests.bench [name…]`."""
