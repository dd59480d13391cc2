"""Pushes the trained model to the Hugging Face Hub: its repository, model card and uploads."""

import os
import shutil
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from policy_trainer.reporting.report.model_card import is_hub_id, model_card, public
from policy_trainer.reporting.report.run import read_run
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.config import GRPOConfig
from shared.errors import UserError

if TYPE_CHECKING:
    from concurrent.futures import Future

# Files in a run's directory and its checkpoints that belong to the run, not to the model.
_OF_THE_RUN = (
    "*/*", "_*", ".*", "lock", "run.json", "server.json", "config.toml", "metrics.jsonl", "samples.jsonl",
    "trainer.json", "trainer_state.json", "optimizer.pt",
)  # fmt: skip
_STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
_INTRODUCTION = (
    "This model is a fine-tuned version of {base}{data}. It was trained with GRPO, introduced in "
    "[DeepSeekMath](https://huggingface.co/papers/2402.03300), with Tandem, through its interface for TRL."
)


def trl_model_card(
    name: str | None,
    base: str,
    dataset: str | None,
    tags: Any,
    run_dir: Path,
    *,
    adapters: bool,
    repository: str | None,
) -> str:
    """Returns the model card, README.md, with the Hub's metadata. base: in the metadata only if it is a Hub id."""
    on_hub = is_hub_id(base)
    introduction = _INTRODUCTION.format(
        base=f"[{base}](https://huggingface.co/{base})" if on_hub else Path(base).name,
        data=f" on the dataset [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else "",
    )
    recorded = public(read_run(run_dir)) if RunDirectory(run_dir).metrics.exists() else None
    return model_card(
        name or "Model",
        introduction,
        recorded,
        base=base,
        dataset=dataset,
        tags=[tags] if isinstance(tags, str) else list(tags or ()),
        adapters=adapters,
        repository=repository,
    )


class Repository:
    """A model's repository on the Hub. Raises UserError at once if it cannot be created, so that no training is lost.

    name: the repository's id.
    """

    def __init__(self, args: GRPOConfig, *, token: str | None = None, private: bool | None = None) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError

        strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
        if strategy not in _STRATEGIES:
            raise UserError(f"hub_strategy: must be one of {', '.join(_STRATEGIES)}, got {strategy!r}")
        self._args, self._strategy, self._token = args, strategy, token or args.hub_token
        if not (self._token or get_token()):
            raise UserError("push_to_hub: no token", "run `hf auth login`, or set HF_TOKEN or hub_token")
        self._api, self._uploads = HfApi(), list["Future[Any]"]()
        wanted = args.hub_model_id or Path(args.output_dir).absolute().name
        private = args.hub_private_repo if private is None else private
        try:
            made = self._api.create_repo(wanted, token=self._token, private=private, exist_ok=True)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(f"push_to_hub: {wanted} cannot be created: {error}", "check hub_model_id") from None
        self.name = made.repo_id

    def upload(self, directory: Path, message: str, *, revision: str | None = None, wait: bool = True) -> Any:
        """Uploads the model in a directory. Returns the CommitInfo, or a Future of it with wait=False."""
        return self._api.upload_folder(
            repo_id=self.name, folder_path=str(directory), commit_message=message, token=self._token,
            revision=revision or self._args.hub_revision, ignore_patterns=list(_OF_THE_RUN), run_as_future=not wait,
        )  # type: ignore[call-overload]  # fmt: skip

    def upload_checkpoint(self, checkpoint: Path, message: str) -> None:
        """Uploads in the background, as hub_strategy says. Skips the checkpoint while an earlier one is being uploaded,
        unless hub_always_push is set."""
        busy = any(not upload.done() for upload in self._uploads)
        if self._strategy == "end" or (busy and not self._args.hub_always_push):
            return
        copy = _linked_copy(checkpoint)  # the run may remove the checkpoint before the upload ends
        self._uploads.append(self._api.run_as_future(self._upload_copy, copy, checkpoint.name, message))

    def _upload_copy(self, copy: Path, name: str, message: str) -> None:
        """Uploads the copy of a checkpoint of this name, then removes it."""
        try:
            self.upload(copy, message)
            within = {"checkpoint": "last-checkpoint", "all_checkpoints": name}.get(self._strategy)
            if within is not None:
                self._api.upload_folder(
                    repo_id=self.name, folder_path=str(copy), path_in_repo=within, token=self._token,
                    commit_message=f"{message}, checkpoint", revision=self._args.hub_revision,
                )  # fmt: skip
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def finish(self) -> None:
        """Waits for all uploads of checkpoints, and warns of those that failed."""
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            if error := upload.exception():
                warnings.warn(f"push_to_hub: a checkpoint was not uploaded: {error}", stacklevel=3)


def _linked_copy(checkpoint: Path) -> Path:
    """Creates a directory next to the checkpoint with hard links to its files, or with copies if links fail."""
    copy = Path(mkdtemp(prefix=".upload-", dir=checkpoint.parent))
    return Path(shutil.copytree(checkpoint, copy, copy_function=_link, dirs_exist_ok=True))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
