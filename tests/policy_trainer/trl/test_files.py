"""A run's files as scripts for TRL look for them; the state as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from policy_trainer.config import TrainConfig
from policy_trainer.run_files.checkpoint import TrainState, read_state
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.files import as_begun, keep, move_earlier_run, resume_from, show_checkpoint
from policy_trainer.trl.steps import Steps
from shared.errors import UserError


def config_of(run: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(**{"model": "org/model", "run_dir": run, **settings})


def save(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"step": step}))
    return path


def test_checkpoints_are_numbered_by_updates(tmp_path: Path) -> None:
    state = TrainerState(max_steps=7, global_step=4, log_history=[{"loss": 0.5, "step": 4}])
    first = save(tmp_path, 1)
    state.best_model_checkpoint = str(first)
    steps = Steps(batches=1, iterations=1, minibatches=4, max_updates=7, of_epoch=None, epoch=7)
    show_checkpoint(first, state, steps.after)
    link = tmp_path / "checkpoint-4"
    assert get_last_checkpoint(str(tmp_path)) == str(link) and read_state(link) == TrainState(step=1)
    assert state.best_model_checkpoint == str(link)
    read = TrainerState.load_from_json(str(link / "trainer_state.json"))
    assert (read.global_step, read.log_history, read.best_model_checkpoint) == (4, state.log_history, str(link))

    (tmp_path / "checkpoint-9").mkdir()  # not a link: it is somebody's
    first.rename(tmp_path / "removed")  # as save_total_limit does
    show_checkpoint(save(tmp_path, 2), state, steps.after)
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-7", "checkpoint-9"], "the last step has fewer updates"
    (tmp_path / "moved").mkdir()
    for part in ("checkpoints", "checkpoint-7"):
        (tmp_path / part).rename(tmp_path / "moved" / part)
    assert read_state(tmp_path / "moved/checkpoint-7").step == 2, "the link is relative"


def test_a_checkpoint_of_adapters_is_no_whole_model(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        (saved / name).write_text("{}")
    show_checkpoint(saved, TrainerState(), int)
    names = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert names == {"adapter_config.json", "trainer.json", "trainer_state.json", "base/config.json"}
    show_checkpoint(saved, TrainerState(), int)
    assert (saved / "base/config.json").exists()


def test_what_has_the_name_of_a_checkpoint_is_renamed(tmp_path: Path) -> None:
    """Such as a checkpoint of TRL's, a file, and somebody's link."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/model.safetensors").write_text("weights")
    (tmp_path / "checkpoint-2").write_text("notes")
    (tmp_path / "checkpoint-3").symlink_to("theirs")
    for step in (1, 2, 3):
        with pytest.warns(UserWarning, match=rf"checkpoint-{step} was renamed to earlier-checkpoint-{step}-1$"):
            link = show_checkpoint(save(tmp_path, step), TrainerState(), int)
        assert read_state(link).step == step
    assert (tmp_path / "earlier-checkpoint-1-1/model.safetensors").read_text() == "weights"
    assert (tmp_path / "earlier-checkpoint-2-1").is_file() and (tmp_path / "earlier-checkpoint-3-1").is_symlink()


def test_a_file_system_without_links_has_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    saved = save(tmp_path, 1)
    with pytest.warns(UserWarning, match=r"^output_dir: .*checkpoint-1 cannot be a link \(not permitted\)"):
        assert show_checkpoint(saved, TrainerState(), int) == saved
    assert (saved / "trainer_state.json").exists()


def test_an_earlier_run_is_moved_and_kept(tmp_path: Path) -> None:
    move_earlier_run(config_of(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "checkpoint-best").symlink_to("theirs")
    for number in (1, 2):
        show_checkpoint(save(tmp_path, 3), TrainerState(), int)
        for name in ("server", "model", "data", "initial-model"):
            (tmp_path / name).mkdir(exist_ok=True)
        with pytest.warns(UserWarning, match=rf"^output_dir: the earlier run .* was moved to .*earlier-run-{number}$"):
            move_earlier_run(config_of(tmp_path))
        place = tmp_path / f"earlier-run-{number}"
        assert {path.name for path in place.iterdir()} == {"checkpoints", "server", "model", "checkpoint-3"}
        assert read_state(place / "checkpoint-3").step == 3
        assert RunDirectory(place).has_trained() and not RunDirectory(tmp_path).has_trained()
        assert get_last_checkpoint(str(tmp_path)) is None and (tmp_path / "initial-model").is_dir()
        assert (tmp_path / "checkpoint-best").is_dir(), "somebody's own link"


@pytest.mark.parametrize("name", ["model", "checkpoints/step-00000003", "checkpoint-3", "checkpoint-500"])
def test_a_model_that_the_run_needs_is_not_moved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show_checkpoint(save(tmp_path, 3), TrainerState(), int)
    for whole in ("model", "checkpoint-500"):
        (tmp_path / whole).mkdir()
    path = tmp_path / name
    monkeypatch.chdir(tmp_path.parent)
    relative = path.relative_to(tmp_path.parent)
    for given in ({"model": str(path)}, {"model": str(relative)}, {"rewards": [f"model/{path}"]}):
        with pytest.raises(UserError, match=rf"^output_dir: .*{name}, which it needs; choose another output_dir"):
            move_earlier_run(config_of(tmp_path, **given))
    assert path.is_dir() and not (tmp_path / "earlier-run-1").exists()
    with pytest.warns(UserWarning, match="was moved"):
        move_earlier_run(config_of(tmp_path, model=str(tmp_path)))  # files next to those of the run


def test_what_was_given_keeps_its_name(tmp_path: Path) -> None:
    def write(text: str) -> Path:
        def into(directory: Path) -> None:
            directory.mkdir()
            (directory / "weights").write_text(text)

        return keep(tmp_path / "out/initial-model", into)

    first, second = write("a"), write("b")
    assert write("a") == first != second
    assert [path.read_text() for path in (first / "weights", second / "weights")] == ["a", "b"]
    assert {*(tmp_path / "out").iterdir()} == {first, second}


def test_a_resumed_run_has_the_model_that_it_began_with(tmp_path: Path) -> None:
    def place(weights: str, kind: str) -> str:
        def write(directory: Path) -> None:
            directory.mkdir()
            (directory / "model.safetensors").write_text(weights)
            (directory / "config.json").write_text(kind)

        return str(keep(tmp_path / "initial-model", write))

    began, trained, other = place("a", "qwen"), place("b", "qwen"), place("b", "llama")
    assert as_begun(config_of(tmp_path, model=trained)).model == trained, "there is no run"
    RunDirectory(tmp_path).write_config(config_of(tmp_path, model=began))
    models = [as_begun(config_of(tmp_path, model=model)).model for model in (began, trained, other, "org/model")]
    assert models == [began, began, other, "org/model"]


def test_a_run_at_work_is_not_moved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with RunDirectory(tmp_path).hold(), pytest.raises(UserError, match="another trainer is at work"):
        move_earlier_run(config_of(tmp_path))
    assert RunDirectory(tmp_path).has_trained() and not (tmp_path / "earlier-run-1").exists()


def test_a_run_is_resumed_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        resume_from(True, config_of(tmp_path))
    for step in (2, 4, 6):
        show_checkpoint(save(tmp_path, step), TrainerState(), int)
    resume_from(True, config_of(tmp_path))
    RunDirectory(tmp_path).write_config(config_of(tmp_path))
    with pytest.raises(UserError, match=r"model: .*cannot change it"):
        resume_from(tmp_path / "checkpoint-4", config_of(tmp_path, model="org/other"))
    with RunDirectory(tmp_path).hold(), pytest.raises(UserError, match="another trainer is at work"):
        resume_from(tmp_path / "checkpoint-4", config_of(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-6")
    resume_from(tmp_path / "checkpoint-4", config_of(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    other = save(tmp_path / "other", 4)
    for wrong in (other, tmp_path / "checkpoint-5", tmp_path, tmp_path / "checkpoints/foo"):
        with pytest.raises(ValueError, match=f"Can't find a valid checkpoint at {wrong}"):
            resume_from(wrong, config_of(tmp_path))
