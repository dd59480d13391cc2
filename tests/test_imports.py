"""Imports point down: shared <- {ref_server, policy_trainer}, which do not import each other; and from room to room.

A library that only one room may know is imported there and nowhere else.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file for package in ("shared", "ref_server", "policy_trainer") for file in (ROOT / package).rglob("*.py")
)
# Where a library may be imported: files, or everything below a folder.
ONLY_IN = {
    "httpx": (
        "shared/client",
        "policy_trainer/rollout/sampling/vllm_client.py",
        "policy_trainer/rewards/http_reward.py",
    ),
    "apsw": ("ref_server/queue/sqlite",),
    "vllm": ("policy_trainer/rollout/sampling/vllm.py",),
    "bitsandbytes": ("policy_trainer/weights/quantised.py",),
}
# The rooms of a package: each imports only rooms that stand before it, and `shared`. docs/house.md says what they hold.
# Rooms of the trainer lie in groups, by what a person looks for: `rollout.sampling` in `rollout`, whose other files are
# a room, too.
ROOMS = {
    "shared": (
        "errors", "spelling", "atomic_files", "process", "logs", "commands", "settings", "sampling_mask", "batch",
        "tensor_file", "pictures", "api", "wire", "devices", "logprobs", "models", "client",
    ),
    "ref_server": (
        "background", "access", "metrics", "queue", "weights", "config", "scoring", "service", "legacy", "tinker",
        "dashboard", "http", "cli", "__main__",
    ),
    "policy_trainer": (
        "metrics", "algorithms.surrogates", "config", "processes.lifecycle", "processes", "data", "weights.quantised",
        "weights.adapters", "rewards", "data.tasks", "rollout.sampling", "rollout.environments", "algorithms.objective",
        "learner", "run_files", "learner.ranks", "weights.published", "reporting", "trainer.evaluation",
        "trainer.queue_client", "weights.reference", "rollout", "trainer", "trainer.doctor", "supervised",
        "reporting.report", "cli.demo", "config.presets", "cli", "cli.launch", "python_api", "trl", "__main__",
    ),
}  # fmt: skip
# Tops that the product never imports.
NEVER = ("tests", "benchmarks", "tools")
FORBIDDEN = {
    "shared": {"ref_server", "policy_trainer", *NEVER},
    "ref_server": {"policy_trainer", *NEVER},
    "policy_trainer": {"ref_server", *NEVER},
}


def imports(source: str) -> set[str]:
    """Full names of every module that is imported anywhere in a source, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return names


def breaches(path: str, source: str) -> list[str]:
    """The forbidden imports of a file with this path."""
    package, room = room_of(path.removesuffix(".py").replace("/", "."))
    allowed = ROOMS[package][: ROOMS[package].index(room) + 1] if room else ROOMS[package]
    breaking = []
    for name in sorted(imports(source)):
        root, other = room_of(name)
        places = ONLY_IN.get(root, (path,))
        there = any(path == place or path.startswith(f"{place}/") for place in places)
        points_up = root == package and other not in allowed
        if root in FORBIDDEN[package] or points_up or not there:
            breaking.append(name)
    return breaking


def room_of(module: str) -> tuple[str, str]:
    """The package of a dotted name, and its room: empty for the package's own __init__, and for that of a group."""
    package, _, rest = module.removesuffix(".__init__").partition(".")
    rooms, names = ROOMS.get(package, ()), rest.split(".")
    for depth in range(len(names), 0, -1):
        if (name := ".".join(names[:depth])) in rooms:
            return package, name
    is_group = any(room.startswith(f"{rest}.") for room in rooms)
    return package, "" if is_group else names[0].replace("__init__", "")


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_is_known(package: str) -> None:
    assert {
        room_of(file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))[1]
        for file in FILES
        if file.relative_to(ROOT).parts[0] == package
    } - {""} == set(ROOMS[package])


def test_imports_point_down() -> None:
    paths = {file.relative_to(ROOT).as_posix(): file for file in FILES}
    refused = {path: breaches(path, file.read_text()) for path, file in paths.items()}
    assert {path: names for path, names in refused.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("shared/batch.py", "def f():\n    from policy_trainer import loss", False),
        ("policy_trainer/data/a.py", "from importlib import import_module\nimport_module('ref_server.app')", False),
        ("policy_trainer/data/a.py", "import ref_servers", True),
        ("policy_trainer/data/a.py", "import httpx", False),
        ("shared/client/connection.py", "import httpx", True),
        ("ref_server/queue/a.py", "from ref_server.http.app import create_app", False),
        ("ref_server/http/a.py", "from ref_server.queue import interface", True),
    ],
)
def test_breaches_are_found(path: str, source: str, allowed: bool) -> None:
    assert (breaches(path, source) == []) is allowed


@pytest.mark.parametrize("package", ["policy_trainer", "ref_server"])
@pytest.mark.parametrize("file", ["shared.py", "shared/__init__.py"])
def test_a_file_of_a_user_in_place_of_ours_is_named(tmp_path: Path, package: str, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    command = [sys.executable, "-c", f"import {package}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    last = f"ImportError: Tandem's package `shared` is hidden by {tmp_path / file}: give that another name"
    assert done.stderr.splitlines()[-1] == last
