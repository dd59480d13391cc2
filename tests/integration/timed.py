"""`python -m tests.integration.timed FILE train …`: a trainer that writes down when it used its device.

A line for each time, from and to, of the clock that all processes of this machine share.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policy_trainer.__main__ import main
from policy_trainer.learner.learner import Learner
from policy_trainer.trainer.evaluation.evaluator import Evaluator

_USES = ((Learner, ("step", "noise_floor", "kl", "probe")), (Evaluator, ("evaluate",)))


def _timed(work: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return work(*arguments, **options)
        finally:
            with file.open("a") as log:
                print(began, time.monotonic(), work.__name__, file=log)

    return call


def spans(file: Path) -> list[tuple[float, float]]:
    """What such a trainer has written. A killed one's last line may be missing."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(float(begin), float(end)) for begin, end, _ in lines]


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    for owner, names in _USES:
        for name in names:
            setattr(owner, name, _timed(getattr(owner, name), file))
    sys.exit(main())
