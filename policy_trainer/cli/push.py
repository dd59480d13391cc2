"""The command `push`: a run's model with a card, to the Hugging Face Hub or into a directory."""

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from policy_trainer.reporting.report.curves import draw_curves
from policy_trainer.reporting.report.model_card import model_card, public
from policy_trainer.reporting.report.run import RecordedRun, read_run
from policy_trainer.reporting.report.story import outcome
from policy_trainer.run_files.checkpoint import Checkpoints
from policy_trainer.run_files.run_directory import STATE, RunDirectory
from shared.errors import UserError
from shared.models import is_adapter

# Of a checkpoint: what only the run needs, such as the optimizer's state.
_OF_THE_RUN = (STATE, "*.pt")
_CARD = "README.md"
_CURVES = "curves.png"


def run(arguments: list[str]) -> int:
    """Prints where the model is. Raises UserError if there is no model, or the place does not accept it."""
    options = _parser().parse_args(arguments)
    recorded = read_run(options.run_dir)
    source = _model_of(options.run_dir, options.checkpoint)
    push = _write_directory if options.repo is None else _upload
    print(push(options, source, recorded))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="policy-trainer push",
        description="Uploads the model of a run of train, sft or reward-model, with its tokenizer and a model card, to "
        "the Hugging Face Hub, or writes both into a directory. The card says what was trained on what, with the "
        "curves, the evaluations, a table of steps and the settings that are not the defaults.",
        epilog="The token is that of `hf auth login`, or HF_TOKEN. HF_ENDPOINT names another hub.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--repo", metavar="NAME", help="repository on the Hub, such as me/my-model; made if it is not there"
    )
    place.add_argument("--to", metavar="DIRECTORY", type=Path, help="a directory that does not exist yet")
    parser.add_argument(
        "--checkpoint", metavar="STEP", type=int, help="that of this step; default: RUN_DIR/model, of the finished run"
    )
    parser.add_argument("--private", action="store_true", help="makes a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch that gets the files; default: main")
    return parser


def _model_of(root: Path, step: int | None) -> Path:
    """The directory of the model to push."""
    directory = RunDirectory(root)
    checkpoints = Checkpoints(directory.checkpoints, keep=1)
    model = directory.model if step is None else checkpoints.of_step(step)
    if model is None or not model.is_dir():
        newest = checkpoints.newest()
        has = "it has no checkpoint" if newest is None else f"its newest checkpoint is {newest.name}"
        missing = "there is no finished model" if step is None else f"there is no checkpoint of step {step}"
        raise UserError(f"RUN_DIR: {root}: {missing}; {has}", "finish the run, or name a step with --checkpoint")
    if not any(model.glob("*.safetensors")):
        raise UserError(
            f"checkpoint: {model} was written under torchrun",
            f"first `policy-trainer export --checkpoint {model} --output DIRECTORY`",
        )
    return model


def _write_directory(options: Namespace, source: Path, recorded: RecordedRun) -> Path:
    if options.to.exists():
        raise UserError(f"to: {options.to} exists", "name another directory")
    options.to.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{options.to.name}-", dir=options.to.parent) as temporary:
        complete = Path(temporary) / "model"
        complete.mkdir()
        _write_card(complete, options, source, recorded, options.to.name)
        _place_model(complete, source, shutil.copy2)
        complete.rename(options.to)
    return options.to


def _upload(options: Namespace, source: Path, recorded: RecordedRun) -> str:
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise UserError("push: no token", "run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    with _errors_of_hub(options.repo):
        repository = api.create_repo(options.repo, private=options.private or None, exist_ok=True).repo_id
        if options.private and not api.model_info(repository).private:
            raise UserError(f"repo: {repository} is public", "make it private there, or leave out --private")
        if options.revision:
            api.create_branch(repository, branch=options.revision, exist_ok=True)
    with TemporaryDirectory(prefix="tandem-push-") as temporary:
        _write_card(Path(temporary), options, source, recorded, repository.rpartition("/")[2], repository)
        _place_model(Path(temporary), source, os.symlink)
        with _errors_of_hub(options.repo):
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=temporary,
                commit_message="Upload with Tandem",
                revision=options.revision,
            )
    return str(commit.commit_url)


@contextmanager
def _errors_of_hub(repo: str) -> Iterator[None]:
    """Raises UserError in place of what the Hub's client raises."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"repo: {repo} does not accept the model: {error}", "check --repo and the token") from None


def _place_model(target: Path, source: Path, place: Callable[[Path, Path], object]) -> None:
    """Puts the model's files into a directory, except those already there. place: called with a file and its path."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(map(file.match, _OF_THE_RUN)) and not (target / file.name).exists():
            place(file.absolute(), target / file.name)


def _write_card(
    target: Path, options: Namespace, source: Path, recorded: RecordedRun, name: str, repository: str | None = None
) -> None:
    """Writes the card and its picture into the directory."""
    shown = public(recorded)
    sentences = outcome(shown)
    if options.checkpoint is not None:
        sentences.append(f"This is the model after step {options.checkpoint}.")
    sentences.append("It was trained with Tandem.")
    try:
        drawn = draw_curves(shown, target / _CURVES)
    except ImportError:
        drawn = False
        print("the card has no curves, which need matplotlib: pip install 'tandem-grpo[plot]'", file=sys.stderr)
    card = model_card(
        name,
        " ".join(sentences),
        shown,
        base=recorded.settings["model"],
        dataset=recorded.settings["data.dataset"],
        adapters=is_adapter(source),
        repository=repository,
        curves=_CURVES if drawn else None,
    )
    (target / _CARD).write_text(card)
