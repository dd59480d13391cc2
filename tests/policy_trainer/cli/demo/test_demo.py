"""What the demo prints about an earlier demo in its directory; tests/integration runs the demo itself."""

import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.cli.demo.demo import demo
from policy_trainer.cli.demo.drawn_sums import DRAWN_SUMS
from policy_trainer.cli.demo.products import PRODUCTS
from policy_trainer.config import DemoConfig, TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError


class Begun(Exception):
    pass


@pytest.fixture(autouse=True)
def without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> Path:
        raise Begun

    monkeypatch.setattr("policy_trainer.cli.demo.demo._base_model", begin)


def begin(run_dir: Path, **settings: Any) -> str:
    """Begins a demo; returns what it prints."""
    output = StringIO()
    with pytest.raises(Begun):
        demo(DemoConfig(run_dir=run_dir, **settings), Console(file=output, width=1000))
    return output.getvalue()


@pytest.mark.parametrize(
    ("seed", "task", "advice"),
    [
        (0, "arithmetic", "`make demo RESUME=1`"),
        (2, "arithmetic", "`make demo SEED=2 RESUME=1`"),
        (0, DRAWN_SUMS, "`make demo VISION=1 RESUME=1`"),
        (1, PRODUCTS, "`make demo TOOLS=1 SEED=1 RESUME=1`"),
    ],
)
def test_what_would_have_continued_an_interrupted_demo(seed: int, task: str, advice: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    begin(run_dir, seed=seed)
    RunDirectory(run_dir).write_config(TrainConfig(model="base", seed=seed, task=task))
    assert f"{advice} would have continued it" in begin(run_dir)
    assert RunDirectory(tmp_path / "demo.previous").config.exists()
    assert not RunDirectory(run_dir).config.exists()


@pytest.mark.parametrize("other", [{"seed": 1}, {"vision": True}, {"tools": True}])
def test_only_the_same_demo_is_resumed(other: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    begin(run_dir)
    RunDirectory(run_dir).write_config(TrainConfig(model="base", seed=0))
    with pytest.raises(UserError, match=r"--resume: .*another --seed, --vision or --tools.*: make demo RESUME=1"):
        demo(DemoConfig(run_dir=run_dir, resume=True, **other), Console(quiet=True))
    begin(run_dir, resume=True)


def test_without_pillow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'tandem-grpo\[vision\]'"):
        demo(DemoConfig(run_dir=tmp_path / "demo", vision=True), Console(quiet=True))
    assert not (tmp_path / "demo").exists()
    begin(tmp_path / "demo")


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_no_demo_has_made_is_left_alone(resume: bool, tmp_path: Path) -> None:
    run_dir = tmp_path / "thesis"
    run_dir.mkdir()
    (run_dir / "chapter.txt").write_text("months of work")
    RunDirectory(run_dir).write_config(TrainConfig(model="base"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"run_dir: .*thesis was not made by a demo.*--run-dir"):
        demo(DemoConfig(run_dir=run_dir, resume=resume), Console(quiet=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_neither_is_one_named_previous_removed(tmp_path: Path) -> None:
    begin(tmp_path / "demo")
    kept = tmp_path / "demo.previous" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(UserError, match=r"demo\.previous was not made by a demo"):
        demo(DemoConfig(run_dir=tmp_path / "demo"), Console(quiet=True))
    assert kept.read_text() == "mine" and (tmp_path / "demo").is_dir()


def test_the_demo_before_the_last_is_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    for number in range(3):
        begin(run_dir)
        (run_dir / str(number)).touch()
    assert (tmp_path / "demo.previous" / "1").exists() and not (tmp_path / "demo.previous" / "0").exists()


def test_an_empty_directory_is_used_as_it_is(tmp_path: Path) -> None:
    assert "is now" not in begin(tmp_path)
