"""Groups on which a training step raises: each is set aside, unless the code seems to be at fault."""

import traceback
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from policy_trainer.processes.lifecycle.endings import RunFailed
from shared import wire
from shared.client import Leased
from shared.devices import is_out_of_memory
from shared.spelling import spell_setting

# Packages in whose code errors are located.
_OURS = ("policy_trainer", "shared")

Failure = tuple[Leased, Exception]


class BadGroups:
    """Groups on which the latest steps raised. They stay leased until a step succeeds, which shows that the code works.

    Two different groups that fail alike before that point to a bug, or to a setting that suits no group.
    """

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        return len(self._failures)

    def add(self, failures: Sequence[Failure], error: Exception) -> bool:
        """Sets groups aside. False if the run cannot go on without them; error then says why.

        failures: of the groups on which the step that raised `error` fails by itself.
        """
        known = {lease.id for lease, _ in failures}
        self._failures = [failure for failure in self._failures if failure[0].id not in known] + [*failures]
        for first, second in combinations(self._failures, 2):
            if _place(first[1]) == _place(second[1]):
                error.add_note(
                    f"Two groups failed alike, so both are released without counting as deliveries: batch "
                    f"{first[0].id}, {describe(first)}; batch {second[0].id}, {describe(second)}.\n"
                    f"`ref-server queue purge {first[0].id} {second[0].id}` drops them if they are to blame"
                )
                return False
        return True

    def pop(self) -> list[Failure]:
        """All that were set aside, once a step has succeeded."""
        failures, self._failures = self._failures, []
        return failures


def fail_together() -> str:
    """What is wrong, and what to do, where each group of a step can be trained, but not all together."""
    return (
        "Each group of this step can be trained by itself, but not all of them together. If memory is short, lower "
        f"{spell_setting('micro_batch_tokens')}; {spell_setting('resume', True)} then trains these groups first. Each "
        "try counts as a delivery"
    )


def describe(failure: Failure) -> str:
    """The group's lengths, what was raised, and what to try."""
    lease, error = failure
    group = lease.batch.group
    text = (
        f"a prompt of {len(group.prompt_ids)} tokens with {group.size} completions of up to "
        f"{group.completion_lengths.max()}: training on it raised {type(error).__name__}: {error}"
    )
    if is_out_of_memory(error):
        text += (
            f". Lower {spell_setting('sampling.max_completion_length')} or "
            f"{spell_setting('sampling.num_generations')}, or use {spell_setting('gradient_checkpointing', True)}: a "
            "group is never divided among micro-batches"
        )
    return text


def _place(error: Exception) -> tuple[type[Exception], str, int]:
    """The type of an error, and the file and line of the innermost frame of our code in its traceback."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS
    ]
    file, line = places[-1] if places else ("", 0)
    return type(error), file, line


def not_finite(leased: Sequence[Leased], steps: int, directory: Path) -> RunFailed:
    """The error of a run whose loss or gradient was not finite in so many steps. Writes the last one's batches."""
    directory.mkdir(exist_ok=True)
    for lease in leased:
        (directory / f"{lease.id}.safetensors").write_bytes(wire.encode(lease.batch))
    return RunFailed(
        f"{steps} steps in a row had a loss or gradient that is not finite; the last batches are in {directory}. "
        "Try a lower optimizer.learning_rate, or float32"
    )
