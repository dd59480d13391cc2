"""compose.yaml started by a real engine, in a separate project that leaves only images behind."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import httpx
import pytest

from tests.harness.ports import free_port

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
_EVERY = [word for name in ("demo", "postgresql", "monitoring") for word in ("--profile", name)]


# Variables of compose.yaml, each with a token.
TOKENS = {f"{role}_TOKEN": f"a-token-of-role-{role.lower()}" for role in ("METRICS", "UPLOAD", "TRAIN", "ADMIN")}


class HasOutput(Protocol):
    def output(self) -> str: ...


class Project:
    """One project: its variables, and its containers, volumes and network, which `remove` deletes."""

    def __init__(self, **variables: str) -> None:
        self.name = f"tandem-test-{uuid4().hex[:8]}"
        self.port = free_port()
        self._environment = {
            **_clean_environment(), "COMPOSE_PROJECT_NAME": self.name, "REF_SERVER_PORT": str(self.port), **variables,
        }  # fmt: skip

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """docker compose with these arguments, its output captured."""
        command = [*_compose(), "--env-file", str(ROOT / "tests/docker/no.env"), *arguments]
        return _run(command, self._environment, check=check)

    def up(self, *arguments: str) -> "Project":
        self.compose(*arguments, "up", "--detach", "--no-build")
        return self

    def until_healthy(self, service: str = "ref-server") -> httpx.Client:
        """A client of the reference server, once the engine says that the service is healthy."""
        until(
            lambda: self.state(service).get("Health", {}).get("Status") == "healthy", f"{service} to be healthy", self
        )
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def until_exited(self, service: str) -> int:
        """The status that the service ended with."""
        until(lambda: self.state(service).get("Status") == "exited", f"{service} to end", self)
        return self.state(service)["ExitCode"]

    def container(self, service: str) -> str:
        return f"{self.name}{_separator()}{service}{_separator()}1"

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)))[0]

    def state(self, service: str) -> dict[str, Any]:
        return self.inspect(service)["State"]

    def health(self, service: str) -> str:
        return self.state(service)["Health"]["Status"]

    def execute(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)

    def copy(self, service: str, path: str, target: Path) -> Path:
        """A file or directory of a container, which may have ended."""
        docker("cp", f"{self.container(service)}:{path}", str(target))
        return target

    def output(self) -> str:
        return self.compose(*_EVERY, "logs", "--no-color", check=False).stdout

    def remove(self) -> None:
        self.compose(*_EVERY, "down", "--volumes", "--remove-orphans", "--timeout", "1", check=False)


def docker(*arguments: str) -> str:
    """What `docker` prints. If it fails, the test fails with its output."""
    return _run(["docker", *arguments], _clean_environment(), check=True).stdout.strip()


def logs(container: str) -> str:
    """What a container wrote to both of its outputs."""
    done = _run(["docker", "logs", container], _clean_environment(), check=True)
    return done.stdout + done.stderr


def until(condition: Callable[[], Any], what: str, project: HasOutput) -> None:
    """Waits for a condition; on a timeout, fails with the project's output."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE:.0f} s for {what}:\n{project.output()}")
        time.sleep(0.2)


def engine_answers() -> bool:
    return (
        shutil.which("docker") is not None and not subprocess.run(["docker", "version"], capture_output=True).returncode
    )


def _compose() -> list[str]:
    """Compose as a plugin of docker, or the older docker-compose program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
    return ["docker-compose"] if plugin.returncode else ["docker", "compose"]


def _separator() -> str:
    """The separator in container names, which differs in the older program."""
    return "_" if len(_compose()) == 1 else "-"


def _clean_environment() -> dict[str, str]:
    """The environment without variables of the services; those of the engine and the build stay."""
    ours = ("REF_SERVER_", "POLICY_TRAINER_", "COMPOSE_", "POSTGRES_")
    named = ("MODEL", "MODELS_DIR", "CONFIG", "INPUTS_DIR", "RUN", "SERVER", "WORKER", "WORKERS", *TOKENS)
    return {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in named}


def _run(command: list[str], environment: dict[str, str], *, check: bool) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, errors="replace")
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
