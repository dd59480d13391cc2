"""The directory of a run: the names of its files, and its configuration."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic_settings import BaseSettings
from rich.console import Console

from policy_trainer.config.resuming import Change, changes
from shared.errors import UserError
from shared.settings.files import read_known

# A refusal names so many settings.
_LISTED = 2


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run's files."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def workers(self) -> Path:
        return self.root / "workers"

    @property
    def bad_batches(self) -> Path:
        return self.root / "bad_batches"

    def holds_a_run(self) -> bool:
        return self.checkpoints.exists() or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def open(self, config: BaseSettings, console: Console, *, resume: bool) -> bool:
        """Writes the configuration. Returns whether an earlier run is continued.

        What a resumed run changes is printed. Raises UserError if the directory holds a run and resume is off, or if
        batches that wait would be wrong under the new settings, or if the directory cannot be written.
        """
        with self._refusals():
            known = self.holds_a_run()
        if known and not resume:
            raise UserError(
                f"run_dir: {self.root} holds a run already; add --resume to continue it, or choose another --run-dir"
            )
        if resume and not known:
            console.print(f"{self.root} holds no run to resume: training begins at step 0", highlight=False)
        if known:
            self._compare(config, console)
        self.write_config(config)
        return known

    def _compare(self, config: BaseSettings, console: Console) -> None:
        """Prints what differs from the run's config.toml. Raises UserError for what must not differ."""
        if not self.config.exists():
            return
        before, _ = read_known(self.config, type(config))
        found = changes(before, config)
        if fixed := [change for change in found if not change.allowed]:
            raise UserError(self._refusal(fixed))
        for change in found:
            console.print(f"since the run was last started: {change}", highlight=False, markup=False, soft_wrap=True)

    def _refusal(self, fixed: Sequence[Change]) -> str:
        newest = max(self.checkpoints.glob("step-*"), default=None)
        start = f"from it: --model {newest} --run-dir OTHER" if newest else "with another --run-dir"
        more = [f"and {len(fixed) - _LISTED} more"] if len(fixed) > _LISTED else []
        return "\n".join(
            [
                f"{fixed[0].name}: --resume cannot change it, because batches of {self.root} may wait in the queue",
                *(f"  {change}" for change in fixed[:_LISTED]),
                *more,
                f"leave it as it was, or start a new run {start}",
            ]
        )

    def write_config(self, config: BaseSettings) -> None:
        """Writes the effective configuration, a file that every command takes with --config.

        The file is replaced in one rename, because a worker may read it at the same time. Raises UserError if the
        directory cannot be written.
        """
        values = json.loads(config.model_dump_json(exclude={"config", "resume"}, exclude_none=True))
        temporary = self.config.with_name(f".{self.config.name}.tmp")
        with self._refusals():
            self.root.mkdir(parents=True, exist_ok=True)
            temporary.write_text(tomli_w.dumps(values), encoding="utf-8")
            temporary.replace(self.config)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turns errors of the file system into UserError."""
        try:
            yield
        except OSError as error:
            reason = "it is a file" if self.root.is_file() else error.strerror or str(error)
            raise UserError(
                f"run_dir: {self.root} cannot be written: {reason}; choose another --run-dir, or mend this one"
            ) from error
