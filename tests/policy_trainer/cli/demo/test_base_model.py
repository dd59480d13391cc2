"""How the demo's base model is saved; the demo shows what it has learnt."""

from pathlib import Path

import pytest

from policy_trainer.cli.demo import base_model


def test_two_processes_may_make_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is quicker: its model stays, and nothing of ours is left."""
    target = tmp_path / "cache" / "base"

    def meanwhile(*_: object) -> None:
        target.mkdir(parents=True)
        (target / "theirs").touch()

    monkeypatch.setattr(base_model, "warm_up", meanwhile)
    base_model.make_base_model(target, 0, lambda done, total: None)
    assert [path.name for path in target.parent.iterdir()] == ["base"]
    assert [path.name for path in target.iterdir()] == ["theirs"]


def test_it_is_a_model_of_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "warm_up", lambda *_: None)
    base_model.make_base_model(tmp_path / "new" / "base", 0, lambda done, total: None)
    assert (tmp_path / "new" / "base" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["base"]
