"""What GRPO makes of its arguments, and what it refuses, before any process starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policy_trainer import GRPO, UserError
from policy_trainer.processes.variables import environment as child_environment
from policy_trainer.python_api.grpo import environment
from policy_trainer.run_files.run_directory import RunDirectory
from shared.spelling import spelled_in_python

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(20)]


def test_arguments_precede_presets_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment sets nothing."""
    monkeypatch.setenv("POLICY_TRAINER_GROUPS_PER_STEP", "3")
    file = tmp_path / "mine.toml"
    file.write_text(f"groups_per_step = 17\nmax_steps = 7\nrun_dir = '{tmp_path}/run'\n")
    grpo = GRPO(
        model=tmp_path, dataset=ROWS, rewards=["format", lambda completion: 1.0], reward_weights=[1, 2], config=file,
        preset="dapo", max_steps=5, loss={"epsilon": 0.1}, data={"answer_rule": "number"},
    )  # fmt: skip
    config = grpo.config
    assert (config.max_steps, config.groups_per_step, config.loss.epsilon) == (5, 17, 0.1)
    assert config.loss.epsilon_high == 0.28  # of the preset
    assert config.rewards == ["format", "caller:function"] and config.reward_weights == [1, 2]
    assert config.task == "jsonl" and config.data.answer_rule == "number"
    assert config.data.path is not None and config.data.path.parent == tmp_path / "run" / "data"
    assert not (tmp_path / "run").exists()


def test_tools_and_environments_become_names() -> None:
    class Chess:
        def reset(self) -> None: ...

    config = GRPO(model="m", tools=["m:search", lambda: 1], environment_factory={"chess": Chess, "go": "m:Go"}).config
    assert config.tools == ["m:search", "caller:function"]
    assert config.named_environments() == {"chess": "caller:Chess", "go": "m:Go"}


def test_functions_of_the_loss_are_names_where_any_process_can_import_them() -> None:
    def local(tokens: Any) -> Any: ...

    config = GRPO(model="m", loss={"surrogate": local, "advantage": environment, "beta": 0.0}).config
    assert config.loss.surrogate is local and config.loss.advantage == "policy_trainer.python_api.grpo:environment"


async def asynchronous(metrics: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_step": 3}, "max_step is not a setting; did you mean max_steps?"),
        ({"output_dir": "x"}, "output_dir is not a setting; did you mean run_dir?"),
        ({"beta": 0.1}, "beta is not a setting; did you mean loss.beta?"),
        ({"loss": {"bta": 0.1}}, "loss.bta is not a setting; did you mean loss.beta?"),
        ({"loss": {"epsilon": 1.3}}, "loss.epsilon: Input should be less than 1, got 1.3"),
        ({"xyzzy": 1}, "`policy-trainer train --help-all` lists all"),
        ({"preset": "none"}, "preset: there is no 'none'"),
        ({"model": object()}, "model: must be a directory or a Hub id, got object; save_pretrained"),
        ({"dataset": ROWS, "data": {"path": "x"}}, "data.path: leave it out, or leave out the argument"),
        ({"dataset": []}, "dataset: must be a datasets.Dataset"),
        ({"eval_dataset": "openai/gsm8k"}, "eval_dataset: must be rows or a file"),
        ({"config": "missing.toml"}, "missing.toml"),
        ({"tools": ["a:f", "b:f"]}, "tools: the model knows tools by name, and two are called f"),
        ({"tools": "m:f"}, "tools: must be a list of functions and names"),
        ({"environment_factory": str, "environment": ["m:C"]}, "environment_factory: leave it out, or leave out the"),
        ({"on_step": 3}, "on_step: must be a function of a step's metrics, got int"),
        ({"on_step": []}, "on_step: must be a function of a step's metrics, got list"),
        ({"on_step": lambda: None}, "on_step: is called as f(metrics) or f(metrics, groups), but too many"),
        ({"on_step": asynchronous}, "on_step: must be a function of a step's metrics, got an async function"),
        ({"task": "jsonl"}, "data.path: task jsonl needs a file of problems: give dataset FILE"),
    ],
)
def test_mistakes_name_the_setting_and_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        GRPO(**{"model": "m", **given})
    assert message in str(error.value) and len(str(error.value).splitlines()) <= 5


def test_a_file_may_name_the_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "in-the-file"\n')
    assert GRPO(config=file, dataset=ROWS, rewards="format").config.model == "in-the-file"
    assert GRPO(config=file, model="m", dataset=ROWS, rewards="format").config.model == "m"
    with pytest.raises(UserError, match=r"^model: is required"):
        GRPO(dataset=ROWS, rewards="format")


def test_a_directory_with_a_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(UserError, match=r"run_dir: .* holds a run already; add resume=True to continue it, or"):
        GRPO(model="m", dataset=ROWS, run_dir=tmp_path).train()
    assert not (tmp_path / "data").exists()


def test_a_run_that_failed_before_its_first_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "evaluation", "step": 0}\n')
    before = dict(os.environ)
    with pytest.raises(UserError, match="model: there is no directory"):
        GRPO(model=tmp_path / "none", dataset=ROWS, rewards=lambda completion: 1.0, run_dir=tmp_path).train()
    assert dict(os.environ) == before
    assert not (tmp_path / "metrics.jsonl").exists(), "the new run writes its own"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset": ROWS[1:]}, "dataset: resume=True cannot change it"),
        ({"rewards": ["format"]}, "rewards: resume=True cannot change it"),
    ],
)
def test_a_resumed_run_keeps_its_problems_and_rewards(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"model": "m", "dataset": ROWS, "rewards": lambda completion: 1.0, "run_dir": tmp_path}
    RunDirectory(tmp_path).write_config(GRPO(**given).config)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=message):
        GRPO(**{**given, **changed, "resume": True}).train()


def test_a_resumed_run_may_have_been_moved_with_its_problems(tmp_path: Path) -> None:
    given = {"model": tmp_path / "none", "dataset": ROWS, "rewards": lambda completion: 1.0}
    before, after = tmp_path / "before" / "run", tmp_path / "after" / "run"
    RunDirectory(before).write_config(GRPO(**given, run_dir=before).config)
    (before / "metrics.jsonl").write_text("{}\n")
    before.parent.rename(after.parent)
    with pytest.raises(UserError, match="model: there is no directory"):  # checked after the settings
        GRPO(**given, run_dir=after, resume=True).train()


def test_a_relative_run_dir_is_where_it_was_when_functions_change_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = GRPO(model="m", dataset=ROWS, rewards=lambda completion: 1.0, run_dir="runs/mine").config
    assert config.run_dir == tmp_path / "runs" / "mine"
    assert config.data.path is not None and config.data.path.parent == tmp_path / "runs" / "mine" / "data"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import policy_trainer", {"torch", "pydantic", "policy_trainer.python_api"}),
        (
            "from policy_trainer import GRPO; GRPO(model='m', dataset=[{'prompt': '2+2='}], rewards='length')",
            {"torch", "transformers"},
        ),
    ],
)
def test_importing_the_package_stays_cheap(code: str, heavy: set[str]) -> None:
    code = f"import sys; {code}; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    with pytest.raises(ImportError):
        from policy_trainer import PPO  # type: ignore[attr-defined] # noqa: F401


@spelled_in_python({"data.path": "dataset"})
def test_processes_of_a_run_spell_settings_as_its_caller() -> None:
    code = "from shared.spelling import spell_setting; print(spell_setting('data.path'), spell_setting('resume', True))"
    printed = subprocess.check_output([sys.executable, "-c", code], env=child_environment(), text=True)
    assert printed == "dataset resume=True\n"
