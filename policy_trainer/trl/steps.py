"""Steps of a run here, and TRL's, which are optimizer updates: a step here has one generation batch or several, and
may be several updates."""

import math
from typing import NamedTuple

from policy_trainer.trl.config import GRPOConfig
from shared.errors import UserError

# A number of steps that no run reaches.
NEVER = 10**9


class Steps(NamedTuple):
    """Our steps, and TRL's, which are optimizer updates. A step has one generation batch, or several that TRL
    accumulates in one update.

    batches: generation batches of a step. iterations: passes over it. minibatches: updates of a pass. max_updates: of
    the run, whose last step may have fewer updates than the others. of_epoch: steps of a pass over the rows, None
    without rows. epoch: updates of a pass, a fraction where accumulation goes beyond it; of the run without rows.
    """

    batches: int
    iterations: int
    minibatches: int
    max_updates: int
    of_epoch: int | None
    epoch: float

    @property
    def updates(self) -> int:
        """Of a step."""
        return self.iterations * self.minibatches

    @property
    def total(self) -> int:
        """Steps of the run."""
        return math.ceil(self.max_updates / self.updates)

    def after(self, step: int) -> int:
        """Updates after so many of our steps."""
        return min(step * self.updates, self.max_updates)

    def of(self, count: float, name: str) -> int:
        """Our steps for a number of TRL's, or for a share of all of them if it is below 1."""
        wanted = math.ceil(count * self.max_updates) if 0 < count < 1 else int(count)
        if wanted < 1:
            raise UserError(f"{name}: must be at least 1, or a share of all steps, got {count}")
        return math.ceil(wanted / self.updates)


def count_steps(args: GRPOConfig, rows: int | None) -> Steps:
    """rows: of the training data; None where an environment has the problems."""
    batches, iterations, minibatches = _shape(args)
    of_epoch = None if rows is None else rows * args.num_generations // args.generation_batch_size  # batches
    epoch = updates_of(args, of_epoch or 0)
    if args.max_steps > 0:
        max_updates = args.max_steps
    elif of_epoch:
        max_updates = math.ceil(args.num_train_epochs * math.ceil(epoch))
    else:
        raise UserError("max_steps: must be given: there are no training rows, or fewer than a generation batch has")
    steps_of_epoch = of_epoch and math.ceil(of_epoch / batches)
    return Steps(batches, iterations, minibatches, max_updates, steps_of_epoch, epoch or max_updates)


def updates_of(args: GRPOConfig, batches: int) -> float:
    """Of so many generation batches; a fraction where accumulation goes beyond them."""
    return batches * args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps


def _shape(args: GRPOConfig) -> tuple[int, int, int]:
    """Generation batches of a step, passes over it, and updates of a pass. An update that has a generation batch
    several times has the gradient of one pass."""
    accumulated, slices = args.gradient_accumulation_steps, args.steps_per_generation
    forwards = slices * args.num_iterations  # of a generation batch
    if accumulated % forwards == 0:
        return accumulated // forwards, 1, 1
    if slices % accumulated == 0:
        return 1, args.num_iterations, slices // accumulated
    if accumulated % slices == 0 and forwards % accumulated == 0:
        return 1, forwards // accumulated, 1
    raise UserError(
        f"gradient_accumulation_steps: {accumulated} must divide steps_per_generation, {slices}, or be a multiple, "
        f"and divide {forwards} or be a multiple of it (that times num_iterations): else updates would mix batches"
    )
