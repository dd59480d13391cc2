"""The command `python -m benchmarks`: all benchmarks, or those that are named."""

import argparse
from collections.abc import Callable

from benchmarks import families, pictures, quantised, queue, sampling, scoring, service, turns

BENCHES: dict[str, Callable[[], None]] = {
    "scoring": scoring.run,
    "families": families.run,
    "pictures": pictures.run,
    "quantised": quantised.run,
    "sampling": sampling.run,
    "turns": turns.run,
    "service": service.run,
    "queue": queue.run,
    "leases": queue.run_leases,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed and memory, as ratios.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)}; all when none is given")
    for name in (names := parser.parse_args().names) or BENCHES:
        if name not in BENCHES:
            parser.error(f"there is no benchmark {name}; there are {', '.join(BENCHES)}")
    for name in names or BENCHES:
        BENCHES[name]()
