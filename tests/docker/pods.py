"""The pods of a JobSet as containers of a Docker engine. A field that is not understood here fails the test."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from tests.docker.compose import docker, logs

_FILES = ("jobset", "data", "tokens")
# Of pods and containers: those that only Kubernetes acts on.
_OF_KUBERNETES = {
    "restartPolicy": "OnFailure", "automountServiceAccountToken": False, "enableServiceLinks": False,
    "envFrom": [{"secretRef": {"name": "it-env", "optional": True}}],
}  # fmt: skip
_PROBES = ("startupProbe", "livenessProbe", "ports", "terminationGracePeriodSeconds")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_CONTAINER_SECURITY = {
    "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
}  # fmt: skip
_POD_SECURITY = {
    "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch",
    "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


class Pods:
    """The pods of RUN_DIR/kubernetes in a network of their own; each container has its pod's name as host name,
    such as `it-trainer-0-0`.

    directory: for the files of secrets and settings.
    """

    def __init__(self, manifests: Path, directory: Path) -> None:
        self._id = f"tandem-test-{uuid4().hex[:8]}"
        self._directory = directory
        directory.mkdir()
        self._volumes: set[str] = set()
        documents = {name: list(yaml.safe_load_all((manifests / f"{name}.yaml").read_text())) for name in _FILES}
        (self.job_set,) = documents["jobset"]
        self._settings: Mapping[str, str] = documents["data"][0]["data"]
        self._tokens: Mapping[str, str] = documents["tokens"][0]["stringData"]
        self.names = [name for name, _ in self._pods()]

    def container(self, pod: str) -> str:
        return f"{self._id}-{pod}"

    def start(self) -> "Pods":
        docker("network", "create", self._id)
        for name, (job, index) in self._pods():
            spec = deepcopy(job["template"]["spec"]["template"]["spec"])
            (container,) = spec.pop("containers")
            mounts = {volume.pop("name"): volume for volume in map(dict, spec.pop("volumes"))}
            assert spec.pop("securityContext") == _POD_SECURITY and spec.pop("shareProcessNamespace") is True
            words = [*self._mounts(name, container, mounts), *self._variables(container, index)]
            self._check_rest({**spec, **container})
            docker(
                "run", "--detach", "--name", self.container(name), "--hostname", name, "--network", self._id,
                "--network-alias", f"{name}.{self.job_set['spec']['network']['subdomain']}", "--init",
                "--restart", "on-failure", "--user", "10001:10001", "--read-only", "--cap-drop", "ALL",
                "--security-opt", "no-new-privileges", *words, container["image"], *container["args"],
            )  # fmt: skip
        return self

    def _pods(self) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
        for job in self.job_set["spec"]["replicatedJobs"]:
            for index in range(job["template"]["spec"]["completions"]):
                yield f"{self.job_set['metadata']['name']}-{job['name']}-0-{index}", (job, str(index))

    def _mounts(self, pod: str, container: dict[str, Any], volumes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
        for mount in container.pop("volumeMounts"):
            match volumes[mount["name"]]:
                case {"emptyDir": {"medium": "Memory"}}:
                    assert mount["mountPath"] == "/dev/shm"  # every container has one
                case {"emptyDir": _}:
                    yield from self._volume(f"{pod}-{mount['name']}", mount["mountPath"])
                case {"persistentVolumeClaim": {"claimName": claim}}:
                    yield from self._volume(claim, mount["mountPath"])
                case {"secret": {"items": items}}:
                    assert mount["readOnly"]
                    files = {item["path"]: self._tokens[item["key"]] for item in items}
                    yield from ("--volume", f"{self._written(f'{pod}-tokens', files)}:{mount['mountPath']}:ro")
                case {"configMap": _}:
                    assert mount["readOnly"]
                    settings = self._written(f"{pod}-settings", self._settings)
                    yield from ("--volume", f"{settings}:{mount['mountPath']}:ro")
                case other:
                    raise AssertionError(other)

    def _volume(self, name: str, path: str) -> tuple[str, str]:
        self._volumes.add(f"{self._id}-{name}")
        return "--volume", f"{self._id}-{name}:{path}"

    def _written(self, name: str, files: Mapping[str, str]) -> Path:
        directory = self._directory / name
        directory.mkdir()
        for file, text in files.items():
            (directory / file).write_text(text)
        return directory

    def _variables(self, container: dict[str, Any], index: str) -> Iterator[str]:
        yield from ("--env", f"JOB_COMPLETION_INDEX={index}")
        for variable in container.pop("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, _INDEX)
            yield from ("--env", f"{variable['name']}={variable['value'] if field is None else index}")

    @staticmethod
    def _check_rest(fields: dict[str, Any]) -> None:
        assert fields.pop("securityContext") == _CONTAINER_SECURITY
        rest = {name: value for name, value in fields.items() if name not in ("name", "image", "args", *_PROBES)}
        assert rest.items() <= _OF_KUBERNETES.items(), rest

    def state(self, pod: str) -> str:
        """Like `exited 0`."""
        return docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", self.container(pod))

    def restarts(self, pod: str) -> int:
        return int(docker("inspect", "--format", "{{.RestartCount}}", self.container(pod)))

    def signal(self, pod: str, process: str, name: str) -> None:
        """Sends a signal to the first process whose command line contains this, except that of `--init`."""
        first = 'grep -la "$0" /proc/[0-9]*/cmdline | cut -d / -f 3 | grep -vx -e 1 -e $$ | sort -n | head -1'
        docker("exec", self.container(pod), "sh", "-c", f"kill -{name} $({first})", process)

    def output(self) -> str:
        return "\n".join(f"{name}:\n{self.log(name)}" for name in self.names)

    def log(self, pod: str) -> str:
        return logs(self.container(pod))

    def remove(self) -> None:
        for name in self.names:
            docker("rm", "--force", self.container(name))
        for volume in self._volumes:
            docker("volume", "rm", volume)
        docker("network", "rm", self._id)
