"""What each rank of a test runs: rank 0 does what its argument says, and the others are alive and do nothing."""

import sys
import time

import torch

from policy_trainer.learner.ranks.world import World, join_world
from policy_trainer.processes.lifecycle.endings import RunFailed


def send(world: World) -> None:
    world.send("step", {})


def compute(world: World) -> None:
    world.gather(torch.zeros(3))


def main() -> None:
    with join_world("cpu", 6) as world:
        if world.rank:
            time.sleep(600)
        try:
            with world.together():
                {"send": send, "compute": compute}[sys.argv[1]](world)
        except RunFailed as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
