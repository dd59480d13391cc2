"""Imports point down: shared <- {ref_server, policy_trainer}, which never meet, and inside a package from room to room.

A library that only one room may know is imported there and nowhere else.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file for package in ("shared", "ref_server", "policy_trainer") for file in (ROOT / package).rglob("*.py")
)
# Who may import a library: files, or everything below a folder.
DOORS = {
    "httpx": ("shared/client",),
    "apsw": ("ref_server/queue",),
    "vllm": ("policy_trainer/sampling/vllm.py",),
}
FORBIDDEN = {
    "shared": {"ref_server", "policy_trainer", "tests"},
    "ref_server": {"policy_trainer", "tests"},
    "policy_trainer": {"ref_server", "tests"},
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
    """What a file of this path must not import, and does."""
    forbidden = FORBIDDEN[path.partition("/")[0]]
    found = []
    for name in sorted(imports(source)):
        root = name.partition(".")[0]
        doors = DOORS.get(root, (path,))
        if root in forbidden or not any(path == door or path.startswith(f"{door}/") for door in doors):
            found.append(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    assert breaches(file.relative_to(ROOT).as_posix(), file.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("shared/a.py", "import ref_server.config", False),
        ("shared/a.py", "def f():\n    from policy_trainer import loss", False),
        ("ref_server/a.py", "from policy_trainer.objective.loss import x", False),
        ("policy_trainer/a.py", "from importlib import import_module\nimport_module('ref_server.http.app')", False),
        ("policy_trainer/a.py", "import ref_servers", True),
        ("policy_trainer/a.py", "import httpx", False),
        ("ref_server/a.py", "from httpx import Client", False),
        ("shared/client/connection.py", "import httpx", True),
        ("shared/wire.py", "import httpx", False),
        ("ref_server/http/app.py", "import apsw", False),
        ("ref_server/queue/sqlite.py", "import apsw.ext", True),
        ("ref_server/queues.py", "import apsw", False),
        ("policy_trainer/sampling/hf.py", "import vllm", False),
        ("ref_server/a.py", "from shared import wire", True),
    ],
)
def test_breaches_are_seen(path: str, source: str, allowed: bool) -> None:
    assert (breaches(path, source) == []) is allowed
