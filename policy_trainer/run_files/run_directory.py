"""The directory of a run: the names of its files, and its configuration."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic_settings import BaseSettings
from rich.console import Console

from shared.errors import UserError


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

        Raises UserError if the directory holds a run and resume is off, or cannot be written.
        """
        with self._refusals():
            known = self.holds_a_run()
        if known and not resume:
            raise UserError(
                f"run_dir: {self.root} holds a run already; add --resume to continue it, or choose another --run-dir"
            )
        if resume and not known:
            console.print(f"{self.root} holds no run to resume: training begins at step 0", highlight=False)
        self.write_config(config)
        return known

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
