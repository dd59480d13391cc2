"""The demo's directory: it is moved aside by the next demo, and nothing else is."""

import shutil
import tomllib
from pathlib import Path

from rich.console import Console

from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError

# A file that every demo writes into its directory before anything else.
MARKER = ".demo"


def rename_earlier(directory: RunDirectory, console: Console) -> None:
    """Renames an earlier demo's directory to NAME.previous, removes the one before it, and marks the new one.

    Raises UserError rather than touch what no demo has written.
    """
    run_dir, seed = directory.root, _seed(directory)
    if not _is_empty(run_dir):
        previous = run_dir.with_name(run_dir.name + ".previous")
        for kept in (run_dir, previous):
            _refuse_what_is_not_ours(kept)
        if seed is not None and not (run_dir / "summary.json").exists():
            console.print(f"{run_dir} holds an interrupted demo; `{resume_command(seed)}` would have continued it")
        shutil.rmtree(previous, ignore_errors=True)
        run_dir.rename(previous)
        console.print(f"the earlier {run_dir} is now {previous}", highlight=False)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / MARKER).write_text("made by `policy-trainer demo`: the next one moves this directory aside\n")


def refuse_another_demo(directory: RunDirectory, seed: int) -> None:
    """Raises UserError if run_dir holds something else, or a demo of another seed: its reference and problems are
    different."""
    _refuse_what_is_not_ours(directory.root)
    earlier = _seed(directory)
    if earlier not in (None, seed):
        raise UserError(
            f"--seed: {directory.root} holds a demo of --seed {earlier}, not of {seed}; continue it with: "
            f"{resume_command(earlier)}, or start a new one without --resume"
        )


def resume_command(seed: int) -> str:
    return f"make demo {f'SEED={seed} ' if seed else ''}RESUME=1"


def _refuse_what_is_not_ours(path: Path) -> None:
    if not _is_empty(path) and not (path / MARKER).is_file():
        raise UserError(
            f"run_dir: {path} was not made by a demo, which would move it aside; choose another --run-dir, or move it "
            "away yourself"
        )


def _is_empty(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _seed(directory: RunDirectory) -> int | None:
    """The seed of the demo in the directory; None when there is none."""
    return tomllib.loads(directory.config.read_text()).get("seed") if directory.config.exists() else None
