"""docker/kubernetes.yaml: Kubernetes' own schema accepts it, and our programs accept its arguments and variables."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import RolloutConfig, TrainConfig
from ref_server.access.keys import Role
from ref_server.config import ServeConfig
from shared.settings import load_settings

FILE = Path(__file__).parents[1] / "docker" / "kubernetes.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))
GIVEN = next(each["data"] for each in OBJECTS if each["kind"] == "ConfigMap")


@pytest.mark.parametrize("object", OBJECTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_kubernetes_accepts_it(object: dict[str, Any]) -> None:
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(object, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**object, "spek": {}}, version, strict=True)


def value(entry: Mapping[str, Any]) -> str:
    """What a variable of a pod holds, in the first pod."""
    match entry.get("valueFrom"):
        case None:
            return entry["value"]
        case {"configMapKeyRef": {"key": key}}:
            return GIVEN[key]
        case {"secretKeyRef": {"key": role}}:
            return f"a-token-of-role-{role}"
        case {"fieldRef": _}:
            return "0"
    raise AssertionError(entry)


def pods() -> Iterator[dict[str, Any]]:
    for each in OBJECTS:
        if "template" in each.get("spec", {}):
            yield each["spec"]["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for pod in pods():
        yield from pod["containers"]


# Read without asking the server for the run's settings, since there is none.
READ: dict[str, Callable[[list[str]], Any]] = {
    "serve": lambda arguments: load_settings(ServeConfig, arguments, prog="ref-server", schema=ServeConfig),
    "train": lambda arguments: load_settings(TrainConfig, arguments, prog="train", schema=FileSchema),
    "rollout": lambda arguments: load_settings(RolloutConfig, arguments, prog="rollout", schema=FileSchema),
}


def served(directory: Path, arguments: list[str]) -> list[str]:
    """The arguments that docker/serve passes to `ref-server`, whose environment contains no token."""
    script = (FILE.parent / "serve").read_text().replace("/tmp/tokens", str(directory / "tokens"))
    program = directory / "ref-server"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nenv >&2\n")
    program.chmod(0o755)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    command, environment = ["sh", "-c", script, "serve", *arguments], {**os.environ, "PATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "a-token-of-role" not in done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The settings of each container, by its name."""
    settings: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    for container in containers():
        with monkeypatch.context() as patch:
            for entry in container["env"]:
                patch.setenv(entry["name"], value(entry))
            words = (
                served(tmp_path, container["args"][1:]) if container["args"][0] == "serve" else container["args"][1:]
            )
            settings[container["name"]] = READ[words[0]](words[1:])
    return settings


def test_all_three_understand_each_other(started: dict[str, Any]) -> None:
    server, worker, trainer = started["ref-server"], started["worker"], started["trainer"]
    assert worker.server == trainer.server == f"http://{server.allowed_hosts[0]}:{server.port}"
    assert worker.run == trainer.run == GIVEN["RUN"]
    assert (worker.worker, worker.workers) == (0, int(GIVEN["WORKERS"]))
    assert worker.weights == trainer.weights == "server"
    for role in (Role.METRICS, Role.UPLOAD, Role.TRAIN, Role.ADMIN):
        assert server.keys.principal(f"Bearer a-token-of-role-{role.name.lower()}").role is role
    assert worker.token.get_secret_value() == "a-token-of-role-upload"
    assert trainer.token.get_secret_value() == "a-token-of-role-train"
    replicas = {each["metadata"]["name"]: each["spec"].get("replicas") for each in OBJECTS if "spec" in each}
    assert replicas["worker"] == worker.workers


def test_no_pod_gets_more_rights_than_it_needs() -> None:
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    for container in containers():
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
