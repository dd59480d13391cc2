"""The directory of a run: the names of its files, and its configuration."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import tomli_w
from pydantic import TypeAdapter
from pydantic_settings import BaseSettings
from rich.console import Console

from policy_trainer.config.marks import Change, Resume, changes, marked
from policy_trainer.run_files.locks import hold, is_held
from shared.api.base import Version
from shared.atomic_files import VersionedDirectory, read_json, write_json, write_text
from shared.errors import UserError, printable
from shared.settings.files import read_known
from shared.settings.names import flat_settings
from shared.spelling import spell_name, spell_setting

# The file of a checkpoint that has the run's progress.
STATE = "trainer.json"
# A refusal names so many settings.
_LISTED = 2


@dataclass(frozen=True)
class _Identity:
    """The content of run.json. finished: the last step of a finished run; 0 otherwise."""

    lineage: str = ""
    finished: Version = 0


class RunDirectory:
    """One run's files: their paths, and its configuration and lineage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.metrics = root / "metrics.jsonl"
        self.samples = root / "samples.jsonl"
        self.checkpoints = root / "checkpoints"
        self.weights = root / "weights"
        self.snapshots = root / "snapshots"
        self.model = root / "model"
        self.logs = root / "logs"
        self.workers = root / "workers"
        self.turns = root / "turns"
        self.bad_batches = root / "bad_batches"
        self.identity = root / "run.json"
        self._lock = root / "lock"

    @property
    def lineage(self) -> str:
        """The lineage of the run in this directory; empty if there is none."""
        return self._read_identity().lineage

    def _read_identity(self) -> _Identity:
        remedy = (
            "delete it: a run that is resumed gets a new lineage then, and its batches that wait in the queue expire"
        )
        return read_json(self.identity, TypeAdapter(_Identity), remedy) if self.identity.exists() else _Identity()

    def keep_lineage(self) -> str:
        """The lineage of the run to resume; a new one if its file was deleted."""
        return self.lineage or self.begin_lineage()

    def begin_lineage(self) -> str:
        """Gives a new run its lineage: a random name, because a deleted run may have had the run's name."""
        lineage = uuid4().hex
        write_json(self.identity, asdict(_Identity(lineage)))
        return lineage

    def mark_finished(self, step: int) -> None:
        """Records that nothing is left to do after this step: the model is saved, and the server knows."""
        write_json(self.identity, asdict(_Identity(self.lineage, step)))

    @property
    def finished(self) -> int:
        """The last step of a finished run whose model is still here; 0 if there is none."""
        return self._read_identity().finished if self.model.exists() else 0

    def hold(self) -> IO[bytes]:
        """Locks the directory until the returned file is closed. Raises UserError while another process has it."""
        with self._refusals():
            return hold(self._lock, *self._in_use())

    def check(self, config: BaseSettings, *, resume: bool, replay: bool = False) -> None:
        """Raises UserError for what `hold` and `open` would refuse. It writes nothing and needs no model.

        replay: whether the directory would be that of a replay, which cannot be continued.
        """
        with self._refusals():
            if self._lock.exists() and is_held(self._lock):
                raise UserError(*self._in_use())
        if not resume:
            self.refuse_trained(replay=replay)
        elif self.holds_a_run():
            self._changes(config)

    def holds_a_run(self) -> bool:
        return self.checkpoints.exists() or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def has_trained(self) -> bool:
        """Whether the run took a step. A run that failed before that has nothing to lose, and may be replaced."""
        if self.checkpoints.exists():
            return True
        if not self.metrics.exists():
            return False
        with self.metrics.open(encoding="utf-8") as lines:
            return any('"kind": "step"' in line for line in lines)

    def refuse_trained(self, *, replay: bool = False) -> None:
        """Raises UserError if the directory holds a run that trained, or cannot be read. replay: as in `check`."""
        with self._refusals():
            trained = self.has_trained()
        if trained:
            other = f"choose another {spell_setting('run_dir')}"
            add = f"add {spell_setting('resume', True)} to continue it, or {other}"
            raise UserError(
                f"{spell_name('run_dir')}: {self.root} holds a run already",
                f"a replay cannot be continued: {other}" if replay else add,
            )

    @property
    def files(self) -> list[Path]:
        """What a run writes here, with the files of a server that the trainer started. The lock is no part of it."""
        paths = [path for path in vars(self).values() if isinstance(path, Path)]
        written = [path for path in paths if path not in (self.root, self._lock)]
        return [*written, self.root / "server", self.root / "server.json"]

    def move(self, target: Path) -> None:
        """Moves the run to `target`, which becomes a run directory. The run's inputs, data and models, stay.

        Raises UserError while another process is at work here.
        """
        with self.hold(), self._refusals():
            target.mkdir()
            for path in self.files:
                if path.exists():
                    path.rename(target / path.name)

    def open(self, config: BaseSettings, console: Console, *, resume: bool) -> bool:
        """Writes the configuration. Returns whether an earlier run is continued.

        What a resumed run changes is printed. Raises UserError if the directory holds a run that trained and resume is
        off, or if batches that wait would be wrong under the new settings, or if the directory cannot be written.
        """
        if not resume:
            self.refuse_trained()
        with self._refusals():
            known = self.holds_a_run()
        if resume and not known:
            console.print(f"{self.root} holds no run to resume: training begins at step 0", highlight=False)
        if known and resume:
            for change in self._changes(config):
                text = printable(f"since the run was last started: {change}", keep="\n")
                console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.write_config(config)
        if known and not resume:
            for left in (self.metrics, self.samples):
                left.unlink(missing_ok=True)
        return known and resume

    def _changes(self, config: BaseSettings) -> list[Change]:
        """What differs from the run's config.toml. Raises UserError for what must not differ."""
        if not self.config.exists():
            return []
        before, _ = read_known(self.config, type(config))
        differences = changes(_moved(before, str(before.get("run_dir", self.root)), str(self.root)), config)
        if fixed := [change for change in differences if not change.allowed]:
            raise self._refusal(fixed)
        return differences

    def _refusal(self, fixed: Sequence[Change]) -> UserError:
        newest = checkpoint_versions(self.checkpoints).newest()
        model, other = spell_setting("model", newest), spell_setting("run_dir")
        start = f"from it: {model} {other} OTHER" if newest else f"with another {other}"
        more = [f"and {len(fixed) - _LISTED} more"] if len(fixed) > _LISTED else []
        lines = [
            (
                f"{spell_name(fixed[0].name)}: {spell_setting('resume', True)} cannot change it, because batches of "
                f"{self.root} may wait in the queue"
            ),
            *(f"  {change}" for change in fixed[:_LISTED]),
            *more,
        ]
        return UserError("\n".join(lines), f"leave it as it was, or start a new run {start}")

    def _in_use(self) -> tuple[str, str]:
        """Problem and remedy while another process has the directory."""
        return (
            f"{spell_name('run_dir')}: another trainer is at work in {self.root}",
            f"stop it, or choose another {spell_setting('run_dir')}",
        )

    def make(self) -> None:
        """Makes the directory. Raises UserError if it cannot be written."""
        with self._refusals():
            self.root.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: BaseSettings) -> None:
        """Writes the effective configuration, a file that every command takes with --config.

        The file is replaced in one rename, because a worker may read it at the same time. Raises UserError if the
        directory cannot be written, and as `config_text` does.
        """
        text = config_text(config)
        self.make()
        with self._refusals():
            write_text(self.config, text)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turns errors of the file system into UserError."""
        try:
            yield
        except OSError as error:
            reason = "it is a file" if self.root.is_file() else error.strerror or str(error)
            raise UserError(
                f"{spell_name('run_dir')}: {self.root} cannot be written: {reason}",
                f"choose another {spell_setting('run_dir')}, or correct this one",
            ) from error


def _has_null(value: Any) -> bool:
    """Whether a JSON value is null, or has one inside. NaN and infinity have become null."""
    if isinstance(value, Mapping | list):
        return any(map(_has_null, value.values() if isinstance(value, Mapping) else value))
    return value is None


def config_text(config: BaseSettings) -> str:
    """The effective configuration as TOML, without what is not kept. Raises UserError for a table of free keys with a
    value that TOML does not have."""
    values = json.loads(config.model_dump_json(exclude=marked(type(config), Resume.NOT_KEPT), exclude_none=True))
    if unwritable := [name for name, value in flat_settings(values).items() if _has_null(value)]:
        raise UserError(
            f"{spell_name(unwritable[0])}: null, NaN and infinity cannot be kept in config.toml",
            "leave it out, or give another value",
        )
    return tomli_w.dumps(values)


def checkpoint_versions(directory: Path) -> VersionedDirectory:
    """The checkpoints of a run by their steps."""
    return VersionedDirectory(directory, "step-{0:08d}", needs=STATE)


def _moved(values: Any, old: str, new: str) -> Any:
    """The settings with paths inside the run's directory, such as those of its data, updated after it was moved."""
    if isinstance(values, dict):
        return {name: _moved(value, old, new) for name, value in values.items()}
    if isinstance(values, str) and values.startswith(f"{old}/"):
        return f"{new}{values.removeprefix(old)}"
    return values
