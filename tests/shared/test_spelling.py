"""Texts name settings as the command line takes them, and inside a Python program as its arguments."""

import subprocess
import sys

import pytest

from shared.spelling import spell_name, spell_setting, spelled_in_python

ARGUMENTS = {"run_dir": "output_dir", "loss.beta": "beta", "data.path": "dataset"}


@pytest.mark.parametrize(
    ("name", "value", "option", "argument"),
    [
        ("data.prompt_style", "plain", "--data.prompt-style plain", "data={'prompt_style': 'plain'}"),
        ("resume", True, "--resume", "resume=True"),
        ("loss.drop_zero_variance", False, "--no-loss.drop-zero-variance", "loss={'drop_zero_variance': False}"),
        ("max_steps", 0, "--max-steps 0", "max_steps=0"),
        ("data.system_prompt", "", "--data.system-prompt ''", "data={'system_prompt': ''}"),
        ("sampling.max_completion_length", None, "--sampling.max-completion-length", "sampling.max_completion_length"),
        ("run_dir", None, "--run-dir", "output_dir"),
        ("data.path", None, "--data.path", "dataset"),
        ("loss.beta", 0.5, "--loss.beta 0.5", "beta=0.5"),
    ],
)
def test_a_setting_is_spelled_as_its_caller_writes_it(name: str, value: object, option: str, argument: str) -> None:
    assert spell_setting(name, value) == option
    assert spell_name(name) == name
    with spelled_in_python(ARGUMENTS):
        assert spell_setting(name, value) == argument
        assert spell_name(name) == ARGUMENTS.get(name, name)
    assert spell_setting(name, value) == option


def test_the_outermost_block_decides() -> None:
    with spelled_in_python(ARGUMENTS):
        with spelled_in_python({"loss.beta": "other"}):
            assert spell_setting("loss.beta", 1) == "beta=1"
        assert spell_setting("loss.beta", 1) == "beta=1"
    assert spell_setting("loss.beta", 1) == "--loss.beta 1"


def test_child_processes_spell_alike() -> None:
    code = "from shared.spelling import spell_setting; print(spell_setting('loss.beta', 0.5))"
    with spelled_in_python(ARGUMENTS):
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "beta=0.5\n"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "--loss.beta 0.5\n"
