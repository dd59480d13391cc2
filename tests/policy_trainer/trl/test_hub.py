"""Model cards as the Hub reads them; uploads to a stand-in of the Hub."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError

from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.hub import Repository, trl_model_card
from tests.policy_trainer.trl.test_trainer import trainer


class Hub:
    """What was made and uploaded. waiting: what is to run in the background; None: runs at once."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.uploads: list[dict[str, Any]] = []
        self.waiting: list[Any] | None = None
        self.fails = False

    def create_repo(self, name: str, **options: Any) -> Any:
        if name == "taken/name":
            raise HfHubHTTPError("403 Forbidden", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        self.made.append({"name": name, **options})
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def run_as_future(self, function: Any, *arguments: Any) -> Any:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*arguments))
            except OSError as error:
                future.set_exception(error)

        if self.waiting is None:
            work()
        else:
            self.waiting.append(work)
        return future

    def upload_folder(self, *, folder_path: str, run_as_future: bool = False, **options: Any) -> Any:
        if self.fails:
            raise OSError("no connection")
        files = huggingface_hub.utils.filter_repo_objects(
            [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()],
            ignore_patterns=options.pop("ignore_patterns", None),
        )
        self.uploads.append({"files": sorted(files), **options})
        assert not run_as_future
        return "a commit"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    return made


def test_without_a_token_it_fails_before_training(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r"^push_to_hub: no token; run `hf auth login`"):
        Repository(GRPOConfig("out", push_to_hub=True))
    with pytest.raises(ValueError, match=r"^push_to_hub: taken/name cannot be created: 403 Forbidden"):
        Repository(GRPOConfig("out", push_to_hub=True, hub_token="t", hub_model_id="taken/name"))
    with pytest.raises(ValueError, match=r"^hub_strategy: must be one of end"):
        Repository(GRPOConfig("out", push_to_hub=True, hub_token="t", hub_strategy="never"))
    assert not hub.made


def test_only_the_model_is_uploaded(hub: Hub, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "README.md", "config.toml", "run.json", "metrics.jsonl", "lock"):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/optimizer.pt").write_text("x")
    args = GRPOConfig(str(tmp_path), hub_token="t", hub_private_repo=True)
    repository = Repository(args)
    assert hub.made == [{"name": tmp_path.name, "token": "t", "private": True, "exist_ok": True}]
    assert repository.upload(tmp_path, "done", revision="v1") == "a commit"
    (upload,) = hub.uploads
    assert upload["files"] == ["README.md", "config.json", "model.safetensors"]
    assert (upload["repo_id"], upload["revision"]) == (f"me/{tmp_path.name}", "v1")


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("end", []),
        ("every_save", [None]),
        ("checkpoint", [None, "last-checkpoint"]),
        ("all_checkpoints", [None, "checkpoint-4"]),
    ],
)
def test_checkpoints_are_uploaded_as_the_strategy_says(
    strategy: str, places: list[str | None], hub: Hub, tmp_path: Path
) -> None:
    for name in ("model.safetensors", "optimizer.pt", "trainer.json"):
        (tmp_path / "step-4").mkdir(exist_ok=True)
        (tmp_path / "step-4" / name).write_text("x")
    link = tmp_path / "links/checkpoint-4"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "step-4")
    repository = Repository(GRPOConfig("out", hub_token="t", hub_strategy=strategy))
    repository.upload_checkpoint(link, "step 4")
    assert [upload.get("path_in_repo") for upload in hub.uploads] == places
    assert all(upload["files"] == ["model.safetensors"] for upload in hub.uploads[:1])
    assert all("optimizer.pt" in upload["files"] for upload in hub.uploads[1:])
    repository.finish()
    assert [*link.parent.iterdir()] == [link]


@pytest.mark.parametrize(("always", "uploads"), [(False, 1), (True, 2)])
def test_one_upload_waits_for_no_other(always: bool, uploads: int, hub: Hub, tmp_path: Path) -> None:
    hub.waiting = []
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/model.safetensors").write_text("x")
    repository = Repository(GRPOConfig("out", hub_token="t", hub_always_push=always))
    for _ in range(2):
        repository.upload_checkpoint(tmp_path / "step-1", "a step")
    assert len(hub.waiting) == uploads
    shutil.rmtree(tmp_path / "step-1")  # as the run may
    for work in hub.waiting:
        work()
    repository.finish()
    assert [upload["files"] for upload in hub.uploads] == [["model.safetensors"]] * uploads
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_that_was_not_uploaded_costs_a_warning_only(hub: Hub, tmp_path: Path) -> None:
    hub.fails = True
    (tmp_path / "step-1").mkdir()
    repository = Repository(GRPOConfig("out", hub_token="t", hub_always_push=True))
    for _ in range(2):
        repository.upload_checkpoint(tmp_path / "step-1", "a step")
    with pytest.warns(UserWarning, match=r"^push_to_hub: a checkpoint was not uploaded: no connection") as warned:
        repository.finish()
    assert len(warned) == 2
    repository.finish()
    with pytest.raises(OSError, match="no connection"):
        repository.upload(tmp_path, "done")


def test_what_one_call_uploads_uploads_nothing_else(hub: Hub, tmp_path: Path) -> None:
    made = trainer(tmp_path, config={"hub_token": "t"})
    made.model = made.processing_class = SimpleNamespace(save_pretrained=lambda directory: None)
    made.push_to_hub(private=True)
    made.save_model(str(tmp_path / "elsewhere"))
    assert [upload["commit_message"] for upload in hub.uploads] == ["End of training"]
    assert 'model="me/out"' in (tmp_path / "out/README.md").read_text()
    made.push_to_hub(token="other", dataset_name="org/rows")
    assert [(each["token"], each["private"]) for each in hub.made] == [("t", True), ("other", None)]
    assert hub.uploads[-1]["token"] == "other"
    pushing = trainer(tmp_path, config={"hub_token": "t", "push_to_hub": True})
    pushing.model = pushing.processing_class = made.model
    pushing.push_to_hub()
    pushing.save_model()
    assert len(hub.made) == 3 and hub.uploads[-1]["commit_message"] == "Model save"


def test_the_card_says_where_the_model_comes_from(tmp_path: Path) -> None:
    card = ModelCard(
        trl_model_card("mine", "org/base", "org/rows", "maths", tmp_path, adapters=True, repository="me/mine")
    )
    data = card.data.to_dict()
    assert (data["base_model"], data["datasets"], data["library_name"]) == ("org/base", "org/rows", "peft")
    assert {"generated_from_trainer", "grpo", "maths"} <= set(data["tags"]) and "me/mine" in card.text
    local = ModelCard(trl_model_card("mine", str(tmp_path), None, None, tmp_path, adapters=False, repository=None))
    assert local.data.to_dict()["library_name"] == "transformers" and "base_model" not in local.data.to_dict()
    assert str(tmp_path) not in local.content
