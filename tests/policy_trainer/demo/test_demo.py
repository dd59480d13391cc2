"""What the demo prints about an earlier demo in its directory; tests/integration runs the demo itself."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from policy_trainer.config import DemoConfig, TrainConfig
from policy_trainer.demo.demo import demo
from policy_trainer.run_files.run_directory import RunDirectory


class Begun(Exception):
    pass


@pytest.mark.parametrize(("seed", "advice"), [(0, "`make demo RESUME=1`"), (2, "`make demo SEED=2 RESUME=1`")])
def test_what_would_have_continued_an_interrupted_demo(
    seed: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: object) -> Path:
        raise Begun

    monkeypatch.setattr("policy_trainer.demo.demo.cached_base_model", begin)
    run_dir, output = tmp_path / "demo", StringIO()
    RunDirectory(run_dir).write_config(TrainConfig(model="base", seed=seed))
    with pytest.raises(Begun):
        demo(DemoConfig(run_dir=run_dir), Console(file=output, width=1000))
    assert f"{advice} would have continued it" in output.getvalue()
    assert RunDirectory(tmp_path / "demo.previous").config.exists()
