"""Pretrained models as directories, made by the example's script."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pretrained import gguf_files
from tests.integration.conftest import start  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]


def imported(name: str, directory: Path) -> Path:
    script = ROOT / "examples" / "import_gguf.py"
    command = [sys.executable, script, *gguf_files(name), "--out", directory, "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imported("SmolLM2-135M-Instruct", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template: a base model."""
    return imported("Gemma 3 270M", tmp_path_factory.mktemp("gemma3"))
