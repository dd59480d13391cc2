"""Speed, memory and exactness, as ratios: `python -m benchmarks [name…]`."""
