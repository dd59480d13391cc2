"""The command `python -m tests.bench`: all benchmarks, or those that are named."""

import sys
from collections.abc import Callable

from tests.bench import queue, sampling, scoring, service, watching
from tests.bench import queue as leases

BENCHES: dict[str, Callable[[], None]] = {
    "scoring": scoring.run,
    "sampling": sampling.run,
    "service": service.run,
    "queue": queue.run,
    "leases": leases.run,
    "watching": watching.run,
}


def main() -> None:
    names = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        sys.exit(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    for name in names:
        BENCHES[name]()


if __name__ == "__main__":
    main()
