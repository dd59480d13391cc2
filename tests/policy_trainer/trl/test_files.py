"""A run's files as scripts for TRL look for them; the state as transformers reads it."""

import json
from pathlib import Path

import pytest
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from policy_trainer.run_files.checkpoint import TrainState, read_state
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.files import begin_anew, resume_from, show_checkpoint
from shared.errors import UserError


def save(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"step": step}))
    return path


def test_checkpoints_are_numbered_by_updates(tmp_path: Path) -> None:
    state = TrainerState(max_steps=7, global_step=4, log_history=[{"loss": 0.5, "step": 4}])
    first = save(tmp_path, 1)
    state.best_model_checkpoint = str(first)
    show_checkpoint(first, state, updates=4)
    link = tmp_path / "checkpoint-4"
    assert get_last_checkpoint(str(tmp_path)) == str(link) and read_state(link) == TrainState(step=1)
    assert state.best_model_checkpoint == str(link)
    read = TrainerState.load_from_json(str(link / "trainer_state.json"))
    assert (read.global_step, read.log_history, read.best_model_checkpoint) == (4, state.log_history, str(link))

    (tmp_path / "checkpoint-9").mkdir()  # not a link: it is somebody's
    first.rename(tmp_path / "removed")  # as save_total_limit does
    show_checkpoint(save(tmp_path, 2), state, updates=4)
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
    show_checkpoint(saved, TrainerState(), updates=1)
    assert {path.name for path in saved.iterdir()} == {"adapter_config.json", "trainer.json", "trainer_state.json"}


def test_an_earlier_run_is_moved_and_kept(tmp_path: Path) -> None:
    begin_anew(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for number in (1, 2):
        show_checkpoint(save(tmp_path, 3), TrainerState(), updates=1)
        for name in ("server", "model", "data", "initial-model"):
            (tmp_path / name).mkdir(exist_ok=True)
        with pytest.warns(UserWarning, match=rf"^output_dir: the earlier run .* was moved to .*earlier-run-{number}$"):
            begin_anew(tmp_path)
        place = tmp_path / f"earlier-run-{number}"
        assert {path.name for path in place.iterdir()} == {"checkpoints", "server", "model"}
        assert RunDirectory(place).has_trained() and not RunDirectory(tmp_path).has_trained()
        assert get_last_checkpoint(str(tmp_path)) is None and (tmp_path / "initial-model").is_dir()


def test_a_run_at_work_is_not_moved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with RunDirectory(tmp_path).hold(), pytest.raises(UserError, match="another trainer is at work"):
        begin_anew(tmp_path)
    assert RunDirectory(tmp_path).has_trained() and not (tmp_path / "earlier-run-1").exists()


def test_a_run_is_resumed_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        resume_from(True, tmp_path)
    for step in (2, 4, 6):
        show_checkpoint(save(tmp_path, step), TrainerState(), updates=1)
    resume_from(True, tmp_path)
    resume_from(tmp_path / "checkpoint-4", tmp_path)
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    other = save(tmp_path / "other", 4)
    for wrong in (other, tmp_path / "checkpoint-5", tmp_path):
        with pytest.raises(ValueError, match=f"Can't find a valid checkpoint at {wrong}"):
            resume_from(wrong, tmp_path)
