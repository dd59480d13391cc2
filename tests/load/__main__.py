"""The command `python -m tests.load`: slow or hostile clients, ten times too much, a long time. Fails below a bar."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.load import hostile, overload, slow, soak

_INTERRUPTED = 130
# Each takes the seconds and an empty directory, and returns whether all bars were reached.
LOADS: Mapping[str, Callable[[float, Path], bool]] = {
    "slow": slow.run,
    "hostile": hostile.run,
    "overload": overload.run,
    "soak": soak.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("names", nargs="+", choices=LOADS)
    parser.add_argument("--seconds", type=float, default=60, help="duration of each load")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    passed = True
    try:
        for name in options.names:
            with TemporaryDirectory() as directory:
                passed &= LOADS[name](options.seconds, Path(directory))
    except KeyboardInterrupt:
        print("stopped")
        return _INTERRUPTED
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
