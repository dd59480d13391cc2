"""One training step beside TRL's GRPOTrainer: from token ids and rewards in hand to new weights, float32, one thread.

Each side is a process of its own; they take their steps in turns, and CPU seconds are compared. Both start from the
same policy, which differs a little from the reference; their losses, gradient norms and weights are compared too.

TRL runs its own `train()`. Its `rollout_func` returns the tokens instead of generating; the call of its reward function
marks the end of the reference's log-probs, and `on_step_end` the end of the update. It is configured to be fast: no
gradient checkpointing, as memory suffices; one group per batch (60 seconds, against 70 with two groups per batch); the
log-probs of the step itself as the old ones, so that they need no forward; SDPA and the fused AdamW, which are its
defaults. Where its default objective differs, it is set to ours. Our side is the learner and the scorer with their
defaults. TRL's logging after a step is not counted. On a CPU its LM head runs on prompts and padding too; since it
would skip them on a GPU, the last side is TRL with that head.

Run it with `make bench-trl`.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np

from policy_trainer.demo.base_model import make_tokenizer
from shared.batch import Array
from shared.models import save_model
from tests.bench import measure
from tests.bench.trl_sides import (
    PROMPT,
    Seconds,
    Took,
    load_policy,
    take_our_steps,
    take_steps_of_trl_on_gpu,
    take_trl_steps,
    weights,
)

BAR = 2.5
# In the order of the last table. The loss is a mean of advantages, which cancel, and a small KL: its bar is absolute.
DIFFERENCE_BARS = (1e-6, 1e-5, 1e-3, 1e-3)
# Steps by number of groups; the first step, where caches are cold, is compared but not timed.
STEPS = {1: 4, 2: 3}

Side = Callable[[Connection, Path, int], None]
SIDES: dict[str, Side] = {
    "Tandem": take_our_steps,
    "TRL": take_trl_steps,
    "TRL's GPU head": take_steps_of_trl_on_gpu,
}


@dataclass(frozen=True)
class Difference:
    """Of a step from the same step of ours. weights: relative to how far ours have moved since the start."""

    loss: float
    grad_norm: float
    weights: float

    @classmethod
    def between(cls, ours: Took, theirs: Took, start: Array) -> "Difference":
        moved = float(np.linalg.norm(ours.weights - start))
        return cls(
            loss=abs(ours.loss - theirs.loss),
            grad_norm=abs(ours.grad_norm / theirs.grad_norm - 1),
            weights=float(np.linalg.norm(ours.weights - theirs.weights)) / moved,
        )


@contextmanager
def started(side: Side, directory: Path, groups: int) -> Iterator[Callable[[], Took]]:
    """Starts a process of this side; yields a function that takes one step of `groups` groups."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=side, args=(theirs, directory, groups), daemon=True)
    process.start()
    theirs.close()  # so that `recv` fails when the process ends

    def step() -> Took:
        ours.send("your turn")
        return ours.recv()

    try:
        yield step
    finally:
        process.terminate()
        process.join()


def take_turns(directory: Path, groups: int) -> tuple[list[list[Seconds]], list[list[Difference]]]:
    """Seconds and differences, by step and then by side."""
    start, seconds, differences = weights(load_policy(directory)), [], []
    with ExitStack() as stack:
        sides = [stack.enter_context(started(side, directory, groups)) for side in SIDES.values()]
        for _ in range(STEPS[groups]):
            took = [step() for step in sides]
            seconds.append([own.seconds for own in took])
            differences.append([Difference.between(took[0], own, start) for own in took])
    return seconds, differences


def time_row(name: str, seconds: list[list[Seconds]], part: Callable[[Seconds], float]) -> list[str]:
    medians = [median(map(part, side)) for side in zip(*seconds[1:], strict=True)]
    ratios = [other / medians[0] for other in medians[1:]]
    return [name, *(f"{own:.2f}" for own in medians), *(f"{r:.2f}x{'' if r >= BAR else ' below'}" for r in ratios)]


def difference_rows(name: str, differences: list[list[Difference]]) -> Iterator[list[str]]:
    for side, steps in list(zip(SIDES, zip(*differences, strict=True), strict=True))[1:]:
        largest = (
            max(step.loss for step in steps),
            max(step.grad_norm for step in steps),
            steps[0].weights,
            steps[-1].weights,
        )
        marks = ("" if value <= bar else " beyond" for value, bar in zip(largest, DIFFERENCE_BARS, strict=True))
        yield [f"{name}, {side}", *(f"{value:.1e}{mark}" for value, mark in zip(largest, marks, strict=True))]


def main() -> None:
    times, exactness = [], []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_model(measure.model_25m(), make_tokenizer(), directory)
        for groups in STEPS:
            name = f"25M, P {PROMPT}, groups: {groups}"
            seconds, differences = take_turns(directory, groups)
            times.append(time_row(f"{name}, with reference", seconds, lambda took: took.reference + took.update))
            times.append(time_row(f"{name}, without", seconds, lambda took: took.update))
            exactness += difference_rows(name, differences)
    _, *others = SIDES
    columns = ["", *(f"{side} s" for side in SIDES), *(f"{side} / Tandem" for side in others)]
    measure.show(f"A training step, float32, one thread: median CPU seconds (bar {BAR}x)", columns, times)
    measure.show(
        "Differences from ours: the largest of the loss, the largest relative one of the gradient norm, and those of "
        f"the weights relative to how far they moved (bars {', '.join(f'{bar:.0e}' for bar in DIFFERENCE_BARS)})",
        ["", "loss", "gradient norm", "weights, first step", "last step"],
        exactness,
    )


if __name__ == "__main__":
    main()
