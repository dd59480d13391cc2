"""`policy-trainer` on a device with memory only for groups of a few tokens.

    python -m tests.integration.short_memory TOKENS raise|kill train ...

A backward of more tokens fails to allocate memory, or is killed as the kernel does when a machine runs out of it.
"""

import os
import signal
import sys
from typing import Any

import torch

from policy_trainer.__main__ import main
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.step_stats import Sums

_accumulate = Learner._accumulate


def limit(tokens: int, ending: str) -> None:
    def accumulate(self: Learner, groups: Any, total: Any) -> Sums:
        if sum(group.tokens.tokens for group in groups) > tokens:
            if ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            torch.empty(1 << 60)
        return _accumulate(self, groups, total)

    Learner._accumulate = accumulate


if __name__ == "__main__":
    limit(int(sys.argv[1]), sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    main()
