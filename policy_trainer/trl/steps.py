"""Conversion of TRL's steps, which are optimizer updates, into Tandem's: a step has one generation batch or several,
and one update or several."""

import math
from typing import NamedTuple

from policy_trainer.trl.config import GRPOConfig
from shared.errors import UserError

# A number of steps that no run reaches.
NEVER = 10**9


class Steps(NamedTuple):
    """The shape of a step. A step has one generation batch, or several that TRL accumulates in one update.

    batches: generation batches in a step. iterations: passes over a step. minibatches: updates in a pass. max_updates:
    updates in the run, whose last step may have fewer than the others. of_epoch: steps in a pass over the rows; None
    without rows. epoch: updates in a pass over the rows, a fraction if an update crosses its end; without rows, all.
    """

    batches: int
    iterations: int
    minibatches: int
    max_updates: int
    of_epoch: int | None
    epoch: float

    @property
    def updates(self) -> int:
        """Updates in a step."""
        return self.iterations * self.minibatches

    @property
    def total(self) -> int:
        """Steps in the run."""
        return math.ceil(self.max_updates / self.updates)

    def after(self, step: int) -> int:
        """Updates after so many of our steps."""
        return min(step * self.updates, self.max_updates)

    def to_tandem(self, count: float, name: str) -> int:
        """Tandem's steps for a number of TRL's, or below 1 for a share of all of them; rounded up."""
        wanted = math.ceil(count * self.max_updates) if 0 < count < 1 else int(count)
        if wanted < 1:
            raise UserError(f"{name}: must be at least 1, or above 0 as a share of all steps, got {count}")
        return math.ceil(wanted / self.updates)


def count_steps(args: GRPOConfig, rows: int | None) -> Steps:
    """rows: number of training rows; None if an environment has the problems."""
    batches, iterations, minibatches = _shape(args)
    of_epoch = None if rows is None else rows * args.num_generations // args.generation_batch_size  # batches
    epoch = updates_of(args, of_epoch or 0)
    if args.max_steps > 0:
        max_updates = args.max_steps
    elif of_epoch:
        max_updates = math.ceil(args.num_train_epochs * math.ceil(epoch))
    else:
        raise UserError("max_steps: must be given: there are no training rows, or too few for one generation batch")
    steps_of_epoch = of_epoch and math.ceil(of_epoch / batches)
    return Steps(batches, iterations, minibatches, max_updates, steps_of_epoch, epoch or max_updates)


def updates_of(args: GRPOConfig, batches: int) -> float:
    """Updates of this many generation batches; a fraction if an update goes beyond them."""
    return batches * args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps


def _shape(args: GRPOConfig) -> tuple[int, int, int]:
    """Generation batches in a step, passes over it, and updates in a pass. An update that goes over a generation batch
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
        f"gradient_accumulation_steps: {accumulated} must be a divisor or a multiple of steps_per_generation, "
        f"{slices}, and of steps_per_generation * num_iterations, {forwards}: otherwise updates would mix batches"
    )
