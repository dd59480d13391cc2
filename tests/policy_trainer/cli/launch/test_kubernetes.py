"""`policy-trainer launch --kubernetes`: its manifests are those of Kubernetes and JobSet, and our programs understand
them. tests/docker/test_kubernetes.py runs the pods."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from policy_trainer.cli.launch.command import launch
from policy_trainer.cli.settings import RolloutFile, read_settings
from policy_trainer.config import RolloutConfig, TrainConfig
from ref_server.access.keys import Role
from ref_server.config import ServeConfig
from shared.errors import UserError
from shared.settings import load_settings
from tests.harness.models import tiny_model
from tests.site import Answer, Site

ROOT = Path(__file__).parents[4]
# The fields of JobSet v1alpha2 that are used, with the values that they may have; None: checked elsewhere.
JOB_SET: Mapping[str, Any] = {
    "suspend": True,
    "network": {"enableDNSHostnames": True, "subdomain": "it"},
    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
    "replicatedJobs": None,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(tiny_model(tmp_path).resolve())


class Manifests:
    """What a dry run wrote."""

    def __init__(self, *arguments: str, run_dir: str = "runs/it") -> None:
        assert launch(["--kubernetes", "--dry-run", "--image", "tandem:gpu", "--run-dir", run_dir, *arguments]) == 0
        self.files = Path(run_dir, "kubernetes")
        names = ("jobset", "data", "tokens", "files")
        self.jobset, self.settings, *self.claims, self.tokens, self.copying = [
            document for name in names for document in yaml.safe_load_all((self.files / f"{name}.yaml").read_text())
        ]
        self.jobs = {job["name"]: job["template"]["spec"] for job in self.jobset["spec"]["replicatedJobs"]}

    def pod(self, job: str) -> dict[str, Any]:
        return self.jobs[job]["template"]["spec"]

    def container(self, job: str) -> dict[str, Any]:
        (container,) = self.pod(job)["containers"]
        return container

    def gpus(self) -> dict[str, int]:
        limits = {job: self.container(job).get("resources", {}).get("limits", {}) for job in self.jobs}
        return {job: each.get("nvidia.com/gpu", 0) for job, each in limits.items()}


def on_inputs(model: str) -> tuple[str, ...]:
    """Arguments for a model in a directory of the cluster, that this machine sees, too."""
    return "--claim", f"inputs={Path(model).parent}", "--model", model


WITH_VLLM = ("--sampler", "vllm-server", "--sampling.max-completion-length", "64")


@pytest.mark.parametrize(
    "options",
    [(), ("--nodes", "2", "--gpus-per-node", "4", "--storage-class", "shared"), (*WITH_VLLM, "--lora.rank", "4")],
)
def test_kubernetes_accepts_them(model: str, options: tuple[str, ...]) -> None:
    written, version = Manifests(*on_inputs(model), *options), kubernetes_validate.latest_version()
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
        for name, job in written.jobs.items()
    ]
    for document in (*jobs, written.settings, *written.claims, written.tokens, written.copying):
        kubernetes_validate.validate(document, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**document, "spek": {}}, version, strict=True)
    assert (written.jobset["apiVersion"], written.jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert written.jobset["spec"] | {"replicatedJobs": None} == JOB_SET
    for job in written.jobset["spec"]["replicatedJobs"]:
        assert job.keys() == {"name", "replicas", "template"} and job["replicas"] == 1


@pytest.mark.parametrize("prompt", ["it's\n$HOME", "größer: {{ 1 }} # | \u2028\x85\ufeff <b>\t"])
def test_all_processes_understand_each_other(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    written = Manifests(*on_inputs(model), "--max-steps", "7", "--data.system-prompt", prompt, "--workers", "3")
    tokens = written.tokens["stringData"]
    for name, text in {**tokens, **written.settings["data"]}.items():
        (tmp_path / name).write_text(text)

    script = written.container("server")["args"][-1]
    serve = re.search(r"ref-server (serve .*) & child=", script)
    assert serve is not None
    words = shlex.split(serve[1].replace("/tokens/tokens", str(tmp_path / "tokens")))
    server = load_settings(ServeConfig, words[1:], prog="it", schema=ServeConfig)

    config = ["--config", str(tmp_path / "config.toml")]
    assert written.container("trainer")["args"] == [
        "policy-trainer", "train", "--config", "/config/config.toml", "--resume"
    ]  # fmt: skip
    trainer = read_settings(TrainConfig, [*config, "--resume"], "train")
    assert trainer.resume and trainer.rollout == "external" and trainer.max_steps == 7
    assert trainer.data.system_prompt == prompt and trainer.run_dir == Path("/runs/it")

    sample = re.search(r"policy-trainer rollout (.*) & child=", written.container("workers")["args"][-1])
    assert sample is not None
    words = shlex.split(sample[1].replace("/config/config.toml", str(tmp_path / "config.toml")))
    monkeypatch.setenv("POLICY_TRAINER_WORKER", "2")
    worker = load_settings(RolloutConfig, words, prog="it", schema=RolloutFile)
    assert (worker.worker, worker.workers) == (2, 3) == (2, written.jobs["workers"]["completions"])

    assert trainer.server == worker.server == f"http://{server.allowed_hosts[0]}:{server.port}"
    assert trainer.weights == worker.weights == "server"
    for job, role in (("workers", Role.UPLOAD), ("trainer", Role.TRAIN)):
        (secret,) = [volume["secret"] for volume in written.pod(job)["volumes"] if "secret" in volume]
        (item,) = secret["items"]
        principal = server.keys.principal(f"Bearer {tokens[item['key']].strip()}")
        assert principal is not None and (principal.role, principal.run) == (role, "it")
        assert worker.token_file == trainer.token_file == Path("/tokens", item["path"])
    for file in written.files.glob("*token*"):
        assert file.stat().st_mode & 0o077 == 0


def test_renewing_the_reference_takes_an_admin(model: str) -> None:
    written = Manifests(*on_inputs(model), "--loss.beta", "0.1", "--reference.sync-steps", "5")
    (secret,) = [volume["secret"] for volume in written.pod("trainer")["volumes"] if "secret" in volume]
    assert secret["items"] == [{"key": "admin.token", "path": "token"}]


def test_each_pod_gets_the_gpus_that_it_uses(model: str) -> None:
    several = Manifests(
        *on_inputs(model), "--nodes", "2", "--gpus-per-node", "4", "--workers", "3", "--sampler", "vllm",
        "--vllm.tensor-parallel-size", "2", "--loss.beta", "0.1",
    )  # fmt: skip
    assert several.gpus() == {"server": 1, "trainer": 4, "workers": 2}
    assert {name: job["completions"] for name, job in several.jobs.items()} == {"server": 1, "trainer": 2, "workers": 3}
    assert all(job["completions"] == job["parallelism"] for job in several.jobs.values())
    assert [claim["spec"]["accessModes"] for claim in several.claims] == [["ReadWriteOnce"], ["ReadWriteMany"]]
    assert Manifests(*on_inputs(model), "--loss.beta", "0").gpus() == {"server": 0, "trainer": 1, "workers": 1}
    none = Manifests(*on_inputs(model), "--gpus-per-node", "0", run_dir="runs/without")
    assert none.gpus() == {"server": 0, "trainer": 0, "workers": 0}


def test_each_worker_has_a_vllm_server(model: str) -> None:
    """It begins before the worker, has the worker's GPUs, no token, and only the worker's pod reaches it."""
    written = Manifests(
        *on_inputs(model), *WITH_VLLM, "--lora.rank", "4", "--vllm.tensor-parallel-size", "2",
        "--vllm-option=--max-num-seqs=64", "--vllm-image", "registry/vllm", "--loss.beta", "0.1",
    )  # fmt: skip
    (vllm,) = written.pod("workers")["initContainers"]
    assert vllm["restartPolicy"] == "Always" and vllm["image"] == "registry/vllm"
    assert vllm["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert written.gpus() == {"server": 1, "trainer": 1, "workers": 0}
    arguments = vllm["args"]
    assert arguments[0] == model and arguments[-3:] == ["--max-num-seqs=64", "--host=127.0.0.1", "--port=8000"]
    assert arguments[arguments.index("--max-lora-rank") + 1] == "8"
    variables = {item["name"]: item["value"] for item in vllm["env"]}
    assert variables["VLLM_SERVER_DEV_MODE"] == "1" and variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    places = {mount["mountPath"]: mount.get("readOnly", False) for mount in vllm["volumeMounts"]}
    assert places == {"/tmp": False, "/hub": False, "/dev/shm": False, str(Path(model).parent): True, "/runs": True}
    assert vllm["securityContext"] == written.container("workers")["securityContext"]
    assert 'vllm_url = "http://127.0.0.1:8000"' in written.settings["data"]["config.toml"]


def test_the_image_of_vllm_is_that_of_docker_compose(model: str) -> None:
    (vllm,) = Manifests(*on_inputs(model), *WITH_VLLM).pod("workers")["initContainers"]
    assert f"${{VLLM_IMAGE:-{vllm['image']}}}" in (ROOT / "compose.yaml").read_text()


def test_vllm_waits_for_a_server_that_is_ready(model: str) -> None:
    """The startup probe, as Kubernetes runs it. Variables that name a proxy do not lead it astray."""
    (vllm,) = Manifests(*on_inputs(model), *WITH_VLLM).pod("workers")["initContainers"]
    *interpreter, code = vllm["startupProbe"]["exec"]["command"]
    assert interpreter == ["python3", "-c"]

    def status(answer: int) -> int:
        with closing(Site(lambda request: Answer(answer if request.path == "/health" else 404))) as site:
            probe = code.replace("http://127.0.0.1:8000", site.url)
            environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
            return subprocess.run(
                [sys.executable, "-c", probe], env=environment, check=False, capture_output=True
            ).returncode

    assert (status(200), status(503)) == (0, 1)


def test_without_vllm_there_is_no_server_for_it(model: str) -> None:
    written = Manifests(*on_inputs(model))
    assert "initContainers" not in written.pod("workers") and "vllm_url" not in written.settings["data"]["config.toml"]


def test_the_precision_of_a_model_that_only_pods_see_is_needed(model: str) -> None:
    with pytest.raises(UserError, match="dtype: the precision of /opt/demo/base, which is not on this machine"):
        Manifests("--model", "/opt/demo/base", "--sampler", "vllm-server", "--dtype", "auto")
    written = Manifests("--model", "/opt/demo/base", "--sampler", "vllm-server", "--dtype", "bfloat16")
    arguments = written.pod("workers")["initContainers"][0]["args"]
    assert arguments[arguments.index("--dtype") + 1] == "bfloat16"


def test_ranks_of_one_node_and_of_several(model: str) -> None:
    container = Manifests(*on_inputs(model), "--gpus-per-node", "4").container("trainer")
    assert container["args"][:3] == ["torchrun", "--standalone", "--nproc-per-node=4"]
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "240"} in container["env"]
    script = Manifests(*on_inputs(model), "--nodes", "2", "--gpus-per-node", "4").container("trainer")["args"][-1]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    assert "--nnodes 2 --nproc-per-node 4" in script and "--rdzv-endpoint it-trainer-0-0.it:29400" in script


def test_claims_are_read_only_and_have_the_code(model: str) -> None:
    claims = ("--claim", f"inputs={Path(model).parent}", "--claim", "more=/more")
    task = ("--task", "jsonl", "--data.path", "rows.jsonl", "--rewards", "my_rewards:good")
    written = Manifests(*claims, "--model", model, *task)
    for job in written.jobs:
        container, volumes = written.container(job), written.pod(job)["volumes"]
        assert container["workingDir"] == str(Path(model).parent)
        assert {"name": "claim-2", "mountPath": "/more", "readOnly": True} in container["volumeMounts"]
        assert {
            "name": "claim-2", "persistentVolumeClaim": {"claimName": "more", "readOnly": True}
        } in volumes  # fmt: skip
        if job != "server":
            assert {"name": "PYTHONPATH", "value": str(Path(model).parent)} in container["env"]


def test_no_pod_gets_more_rights_than_it_needs(model: str) -> None:
    written = Manifests(*on_inputs(model))
    for pod in (*map(written.pod, written.jobs), written.copying["spec"]):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
        assert pod["containers"][0]["securityContext"] == {
            "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip


def test_a_model_that_only_pods_see(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = Manifests("--model", "/opt/demo/base")
    assert "/opt/demo/base is not on this machine" in capsys.readouterr().out
    assert "--model /opt/demo/base" in written.container("server")["args"][-1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--run", "Mine"], "run: pods are named after it, got 'Mine'"),
        (["--run", "a" * 41], "run: pods are named after it"),
        (["--resume"], "resume: the trainer's job always continues"),
        (["--reference.snapshot-root", "s"], "reference.snapshot_root: the server and the trainer share no directory"),
        (["--task", "jsonl", "--data.path", "rows.jsonl"], "data.path: pods do not see rows.jsonl"),
        (["--claim", "c=/c", "--task", "jsonl", "--data.path", "/d/r.jsonl"], "data.path: pods do not see /d/r.jsonl"),
        (["--claim", "c=/c", "--task", "jsonl", "--data.path", "../r.jsonl"], "data.path: pods do not see ../r.jsonl"),
        (["--rewards", "my_rewards:good"], "rewards: pods do not see my_rewards:good"),
        (["--environment", "game=my_game:Game"], "environment: pods do not see my_game:Game"),
        (["--data.chat-template", "t.jinja"], "data.chat_template: pods do not see t.jinja"),
    ],
)
def test_what_is_refused(model: str, arguments: list[str], problem: str) -> None:
    given = ["--kubernetes", "--dry-run", "--image", "i", "--run-dir", "runs/it", "--model", "/opt/demo/base"]
    with pytest.raises(UserError, match=re.escape(problem)):
        launch([*given, *arguments])
    assert not Path("runs").exists()


def test_without_an_image(model: str) -> None:
    with pytest.raises(UserError, match="launch: pods need an image with Tandem"):
        launch(["--kubernetes", "--model", model])


def test_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch([])
    assert "one of the arguments --slurm --kubernetes is required" in capsys.readouterr().err


def test_a_model_of_this_machine_is_refused(model: str) -> None:
    with pytest.raises(UserError, match="model: pods do not see"):
        Manifests("--model", model)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--image", "i", "--claim", "inputs"], "must be NAME=DIR, as in inputs=/inputs; got 'inputs'"),
        (["--image", "i", "--claim", "a b=/c"], "must be NAME=DIR"),
        (["--image", "i", "--storage", "much"], "must be a size such as 500Gi; got 'much'"),
        (["--image", "i", "--sbatch=--time=1"], "--sbatch"),
    ],
)
def test_what_cannot_be_read(
    model: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch(["--kubernetes", "--dry-run", "--run-dir", "runs/it", "--model", model, *arguments])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 3])
def test_kubectl_gets_the_files(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """The JobSet first, suspended: it is refused if another one of this name exists."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert launch(["--kubernetes", "--image", "i", "--run-dir", "runs/it", *on_inputs(model)]) == status
    files = Path("runs/it/kubernetes").resolve()
    create = f"create --filename {files}/jobset.yaml\n"
    apply = f"apply --filename {files}/data.yaml --filename {files}/tokens.yaml\n"
    begin = 'patch jobset it --type merge --patch {"spec": {"suspend": false}}\n'
    assert (tmp_path / "called").read_text() == (create if status else create + apply + begin)
