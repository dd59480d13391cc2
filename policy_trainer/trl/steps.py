"""Converts TRL's steps, which are optimizer updates, to Tandem's: each has one or more generation batches and one or
more updates."""

import math
from typing import NamedTuple

from policy_trainer.trl.config import GRPOConfig
from shared.errors import UserError

# A number of steps that no run reaches.
NEVER = 10**9


class Steps(NamedTuple):
    """The shape of Tandem's steps. A step has one generation batch, or several that TRL accumulates in one update.

    batches: generation batches per step. iterations: passes over a step's batches. minibatches: updates per pass.
    max_updates: updates in the run, whose last step may have fewer than the others. of_epoch: steps per epoch; None
    without rows. epoch: updates per epoch, fractional if an update extends into the next; without rows, those of the
    run.
    """

    batches: int
    iterations: int
    minibatches: int
    max_updates: int
    of_epoch: int | None
    epoch: float

    @property
    def updates(self) -> int:
        """Updates per step."""
        return self.iterations * self.minibatches

    @property
    def total(self) -> int:
        """Steps in the run."""
        return math.ceil(self.max_updates / self.updates)

    def after(self, step: int) -> int:
        """Returns the number of updates in Tandem's first `step` steps."""
        return min(step * self.updates, self.max_updates)

    def to_tandem(self, count: float, name: str) -> int:
        """Converts a number of TRL's steps, or below 1 a fraction of all of them, to Tandem's, rounded up. name: the
        argument that gives it, for the UserError if it is too small."""
        wanted = math.ceil(count * self.max_updates) if 0 < count < 1 else int(count)
        if wanted < 1:
            raise UserError(f"{name}: must be at least 1, or above 0 as a share of all steps, got {count}")
        return math.ceil(wanted / self.updates)


def count_steps(args: GRPOConfig, rows: int | None) -> Steps:
    """Computes the shape of the run's steps. rows: number of training rows; None if an environment has the problems."""
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
    """Returns the number of updates on this many generation batches; fractional if an update needs more of them."""
    return batches * args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps


def _shape(args: GRPOConfig) -> tuple[int, int, int]:
    """Returns the generation batches per step, the passes over them, and the updates per pass. An update that
    accumulates several passes over a generation batch has the gradient of one."""
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
