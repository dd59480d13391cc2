"""A full or broken disk ends a run with a reason, and no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from policy_trainer.lifecycle.endings import RunFailed

_REMEDY = "once it can, --resume goes on from the last checkpoint"


@contextmanager
def write_failures(what: Path | str, remedy: str = _REMEDY) -> Iterator[None]:
    """Turns errors of the file system into RunFailed. what: the file that is written. remedy: what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{what} cannot be written: {error}; {remedy}") from error
