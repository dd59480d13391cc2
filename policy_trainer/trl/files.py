"""Puts a run's files where TRL scripts expect them in `output_dir`: links `checkpoint-N` lead to the checkpoints, which
contain `trainer_state.json`. An earlier run is moved out of the way; models that were passed to a run stay."""

import hashlib
import tomllib
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.config import TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import keep_directory
from shared.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerState

INITIAL_MODEL = "initial-model"
_CHECKPOINT = "checkpoint-"


def show_checkpoint(saved: Path, state: "TrainerState", updates_after: Callable[[int], int]) -> Path:
    """Links `checkpoint-N` to a checkpoint of the run, and writes `trainer_state.json` into it. N is TRL's global step:
    the number of optimizer updates so far.

    Removes links to checkpoints that no longer exist, and renames anything else of that name. updates_after: converts
    Tandem's steps to N. Returns the link, or the checkpoint itself if the file system does not support links.
    """
    from policy_trainer.learner.ranks.export import DESCRIPTION
    from shared.models import is_adapter

    output_dir = saved.parent.parent
    link = output_dir / f"{_CHECKPOINT}{updates_after(_step(saved) or 0)}"
    _unlink(old for old in _links(output_dir) if old == link or not old.exists())
    if link.exists() or link.is_symlink():  # such as a checkpoint that TRL wrote; TRL would overwrite it
        aside = _free(output_dir / f"earlier-{link.name}")
        link.rename(aside)
        warnings.warn(f"output_dir: {link} was renamed to {aside.name}", stacklevel=3)
    try:
        link.symlink_to(saved.relative_to(output_dir))
    except OSError as error:
        warnings.warn(f"output_dir: {link} cannot be a link ({error}): the checkpoint is {saved}", stacklevel=3)
        link = saved
    if is_adapter(saved) and (saved / "config.json").exists():
        # Otherwise transformers would take the directory for a full model.
        (saved / DESCRIPTION).parent.mkdir(exist_ok=True)
        (saved / "config.json").replace(saved / DESCRIPTION)
        (saved / "generation_config.json").unlink(missing_ok=True)
    if state.best_model_checkpoint == str(saved):
        state.best_model_checkpoint = str(link)
    state.save_to_json(str(saved / "trainer_state.json"))
    return link


def move_earlier_run(config: TrainConfig) -> None:
    """Moves an earlier run in output_dir to output_dir/earlier-run-K. TRL would overwrite its files instead.

    Raises UserError if another trainer is running there, or if a model that this run needs would be moved.
    """
    output_dir = config.run_dir
    directory = RunDirectory(output_dir)
    if not output_dir.is_dir():
        return
    rewards = [name.removeprefix("model/") for name in config.rewards if name.startswith("model/")]
    for name in (config.model, *rewards):
        if _is_replaced(Path(name), directory):
            raise UserError(f"output_dir: the run would replace {name}, which it needs", "choose another output_dir")
    if not directory.has_trained():
        return
    links = _links(output_dir)
    place = _free(output_dir / "earlier-run")
    directory.move(place)
    for link in links:
        link.rename(place / link.name)
    warnings.warn(f"output_dir: the earlier run in {output_dir} was moved to {place}", stacklevel=3)


def _is_replaced(model: Path, directory: RunDirectory) -> bool:
    """Whether a run in the directory would write to the model's path."""
    root = directory.root.resolve()
    if not model.exists() or not model.resolve().is_relative_to(root):
        return False
    first = [*model.resolve().relative_to(root).parts, ""][0]
    return first in {path.name for path in directory.files} or first.startswith(_CHECKPOINT)


def resume_from(wanted: Any, config: TrainConfig) -> None:
    """Removes the checkpoints after the one to resume from. wanted: its path, or True for the newest.

    config: that of the resumed run. Raises UserError if there is no such checkpoint, or, before any is removed, if the
    run could not resume with this config.
    """
    from policy_trainer.run_files.checkpoint import Checkpoints

    directory = RunDirectory(config.run_dir)
    checkpoints = Checkpoints(directory.checkpoints, keep=1)
    if wanted is True:
        if checkpoints.newest() is None:
            raise UserError(f"resume_from_checkpoint: No valid checkpoint found in output directory ({config.run_dir})")
        return
    path = Path(wanted).resolve()
    step = _step(path)
    if path.parent != checkpoints.directory.resolve() or step is None or checkpoints.of_step(step) is None:
        raise UserError(
            f"resume_from_checkpoint: Can't find a valid checkpoint at {wanted}: it must be in this output_dir, "
            f"{config.run_dir}, with the run's queue; to start a new run from its weights, pass it as the model, with "
            "another output_dir"
        )
    directory.check(config, resume=True)
    with directory.hold():
        checkpoints.discard_after(step)


def as_begun(config: TrainConfig) -> TrainConfig:
    """Returns the configuration of a resumed run, with the model that the run started from.

    As in TRL, the weights of a model object are ignored on resuming: they may have been trained since.
    """
    file, given = RunDirectory(config.run_dir).config, Path(config.model)
    if not file.exists() or not _is_initial(given, config.run_dir):
        return config
    # The directory may have been moved.
    began = config.run_dir / Path(tomllib.loads(file.read_text(encoding="utf-8")).get("model", "")).name
    if not _is_initial(began, config.run_dir) or _description(began) != _description(given):
        return config
    return config.model_copy(update={"model": str(began)})


def _is_initial(model: Path, run_dir: Path) -> bool:
    return model.parent == run_dir and model.name.startswith(f"{INITIAL_MODEL}-") and model.is_dir()


def _description(model: Path) -> dict[str, bytes]:
    """The content of all files except the weights, by name."""
    return {file.name: file.read_bytes() for file in model.iterdir() if ".safetensors" not in file.name}


def keep(target: Path, write: Callable[[Path], object]) -> Path:
    """Writes a directory next to `target`, with a hash of its content in its name so that nothing that was passed to
    earlier runs is replaced. Returns its path.

    write: creates the directory at the path that it is given.
    """
    return keep_directory(target.parent, write, lambda directory: f"{target.name}-{_content_hash(directory)[:12]}")


def _content_hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(directory)} {_file_hash(path)}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def merge(adapters: Path, run_dir: Path) -> str:
    """Merges a checkpoint's adapters into their base model. Returns the directory of the merged model."""
    from policy_trainer.learner.ranks.export import export

    return str(keep(run_dir / "merged-model", lambda directory: export(adapters, directory)))


def _step(saved: Path) -> int | None:
    number = saved.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def _free(path: Path) -> Path:
    """Returns the path with the first suffix -1, -2, … that is not taken."""
    return next(free for k in count(1) if not (free := path.with_name(f"{path.name}-{k}")).exists())


def _links(output_dir: Path) -> list[Path]:
    """Returns a run's links `checkpoint-N`, and none that lead elsewhere."""
    place = Path(RunDirectory(output_dir).checkpoints.name)
    several = [path for path in output_dir.glob(f"{_CHECKPOINT}*") if path.is_symlink()]
    return [path for path in several if path.readlink().parent == place]


def _unlink(links: Iterable[Path]) -> None:
    for link in links:
        link.unlink()
