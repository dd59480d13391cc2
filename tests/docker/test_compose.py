"""compose.yaml as users start it: real images, containers, volumes and networks."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from shared import wire
from shared.batch import Batch
from shared.models import save_model
from tests.docker.compose import ROOT, TOKENS, Project, docker, until
from tests.harness.runs import steps_of

MakeProject = Callable[..., Project]
Rollout = Callable[[], Batch]


def upload(http: httpx.Client, batch: Batch) -> None:
    headers = {"Content-Type": wire.CONTENT_TYPE}
    assert http.post("/v1/batches", content=wire.encode(batch), headers=headers).status_code == 201


def lease(http: httpx.Client) -> httpx.Response:
    leased = http.post("/v1/batches/lease", json={"consumer": "c", "wait_seconds": 15, "lease_seconds": 120})
    assert leased.status_code == 200, leased.text
    return leased


def ack(http: httpx.Client, leased: httpx.Response) -> str:
    key = {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}
    return http.post("/v1/leases/ack", json={"leases": [key]}).json()["results"][0]["outcome"]


def naive_logps(directory: Path, batch: Batch) -> np.ndarray:
    """(C,) float64, row by row, by the model as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    rows = []
    for completion in batch.group.completions():
        ids = torch.from_numpy(np.concatenate([batch.group.prompt_ids, completion]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -len(completion) - 1 : -1] / batch.temperature
        rows.append(logits.log_softmax(-1).gather(1, torch.from_numpy(completion)[:, None])[:, 0].numpy())
    return np.concatenate(rows)


def test_a_client_on_the_host_gets_scores(server: Project, rollout: Rollout, tmp_path: Path) -> None:
    batch = rollout()
    with server.until_healthy() as http:
        upload(http, batch)
        leased = lease(http)
        scored = wire.decode(leased.content)
        assert scored.ref_logps is not None
        base = server.copy("ref-server", "/opt/demo/base", tmp_path / "base")
        np.testing.assert_allclose(scored.ref_logps, naive_logps(base, batch), atol=1e-4)
        assert ack(http, leased) == "ok"


def hardened(project: Project, service: str) -> str:
    """Checks that a service runs without root and privileges, on a read-only file system. Returns its user."""
    status = dict(line.split(":\t") for line in project.execute(service, "cat", "/proc/self/status").splitlines())
    (user,) = {*status["Uid"].split()}
    assert user != "0"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert project.inspect(service)["HostConfig"]["ReadonlyRootfs"]
    return user


def test_the_server_has_no_capabilities(server: Project) -> None:
    server.until_healthy().close()
    assert hardened(server, "ref-server") == "10001"


def test_only_volumes_and_tmp_are_writable(server: Project) -> None:
    """For root too, since the rest is mounted read-only."""
    server.until_healthy().close()
    for place in ("/etc", "/opt/venv", "/usr/local/bin", "/models"):
        write = f"touch {place}/x 2>&1 || true"
        refused = docker("exec", "--user", "0", server.container("ref-server"), "sh", "-c", write)
        assert refused == f"touch: cannot touch '{place}/x': Read-only file system"
    server.execute("ref-server", "sh", "-c", "touch /data/x /tmp/x && rm /data/x")


def test_the_port_is_published_on_loopback_only(server: Project) -> None:
    server.until_healthy().close()
    published = server.inspect("ref-server")["NetworkSettings"]["Ports"]
    assert published == {"8400/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(server.port)}]}


@pytest.mark.parametrize(("name", "status"), [("ref-server:8400", 200), ("localhost", 200), ("evil.example", 403)])
def test_other_host_names_are_refused(server: Project, name: str, status: int) -> None:
    with server.until_healthy() as http:
        assert http.get("/v1/model", headers={"Host": name}).status_code == status


def test_what_is_in_the_image(server: Project) -> None:
    server.until_healthy().close()
    for tool in ("gcc", "cc", "make", "pip", "pip3"):
        assert server.execute("ref-server", "sh", "-c", f"command -v {tool} || true") == ""
    installer = r"find / -xdev \( -name pip -o -name 'pip-*' \) -path '*python3*' 2>/dev/null || true"
    assert server.execute("ref-server", "sh", "-c", installer) == ""
    image = json.loads(docker("image", "inspect", "tandem:cpu"))[0]
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_a_crash_loses_nothing(project: MakeProject, rollout: Rollout) -> None:
    """A crash of the process, which the engine restarts, and one of the container."""
    server = project().up()
    batches = [rollout() for _ in range(3)]
    with server.until_healthy() as http:
        for batch in batches:
            upload(http, batch)
        leased = lease(http)
        server.execute("ref-server", "sh", "-c", "kill -9 $(pidof -s python3 python3.11 python)")
        until(lambda: server.inspect("ref-server")["RestartCount"] == 1, "the container to be restarted", server)
    with server.until_healthy() as http:
        second = lease(http)
        docker("kill", server.container("ref-server"))
    with server.up().until_healthy() as http:
        assert [ack(http, item) for item in (leased, second)] == ["ok", "ok"]
        assert lease(http).headers["Batch-Id"] == batches[2].id
        assert {leased.headers["Batch-Id"], second.headers["Batch-Id"]} == {batch.id for batch in batches[:2]}


def test_a_stop_ends_the_server_with_status_0(project: MakeProject) -> None:
    """It answers a waiting long poll. A container that had to be killed would have status 137."""
    server = project().up()
    server.until_healthy().close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as poll:
        body = b'{"consumer": "poll", "wait_seconds": 60}'
        poll.sendall(
            b"POST /v1/batches/lease HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        server.compose("stop", "ref-server")
        assert poll.recv(4096).startswith(b"HTTP/1.1 ")
    assert server.until_exited("ref-server") == 0
    assert "Traceback" not in server.output()


def test_a_missing_model_is_refused(project: MakeProject) -> None:
    done = project(MODEL="/models/mine").compose("run", "--rm", "ref-server", check=False)
    assert done.returncode == 2
    assert "there is no model /models/mine" in done.stderr + done.stdout
    assert "Set MODELS_DIR" in done.stderr + done.stdout


def test_an_address_beyond_loopback_needs_a_token(project: MakeProject) -> None:
    done = project(REF_SERVER_ADDRESS="0.0.0.0").compose("run", "--rm", "ref-server", check=False)
    assert done.returncode == 2
    assert "set UPLOAD_TOKEN for workers, TRAIN_TOKEN for trainers" in done.stderr + done.stdout


def test_a_run_with_own_model_data_and_tokens(project: MakeProject, tmp_path: Path) -> None:
    """The worker and the trainer run in separate containers, each with a token of its own role."""
    save_model(make_model(1), make_tokenizer(), tmp_path / "models" / "mine")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(100))
    )
    (inputs / "mine.toml").write_text(
        'model = "overridden by MODEL"\ntask = "jsonl"\nmax_steps = 3\ngroups_per_step = 4\nthreads = 1\n'
        '[data]\npath = "/inputs/problems.jsonl"\n'
        "[sampling]\nnum_generations = 4\nprompts_per_round = 4\nmax_completion_length = 8\n"
        "[loss]\ndrop_zero_variance = false\n[evaluation]\nproblems = 8\n"
    )
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == Path.home().owner() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)  # pytest keeps its services closed to the container's user
    services = project(
        MODELS_DIR=str(tmp_path / "models"), MODEL="/models/mine", INPUTS_DIR=str(inputs), CONFIG="/inputs/mine.toml",
        RUN="mine", REF_SERVER_THREADS="1", **TOKENS,
    ).up("--profile", "worker", "--profile", "trainer")  # fmt: skip
    assert services.until_exited("trainer") == 0, services.output()
    assert services.until_exited("worker") == 0, services.output()
    steps = steps_of(services.copy("trainer", "/runs/mine", tmp_path / "run"))
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert steps[0]["kl_at_step_0"] < 1e-9
    with services.until_healthy() as http:
        assert http.get("/v1/queue").status_code == 401
        assert http.get("/readyz").status_code == 200
        http.headers["Authorization"] = f"Bearer {TOKENS['ADMIN_TOKEN']}"
        assert http.get("/v1/queue").json()["runs"]["mine"]["done"]["batches"] == 12
    for service, variable in (("worker", "UPLOAD_TOKEN"), ("trainer", "TRAIN_TOKEN")):
        variables = "\n".join(services.inspect(service)["Config"]["Env"])
        assert {name for name, token in TOKENS.items() if token in variables} == {variable}


def test_the_demo(project: MakeProject, tmp_path: Path) -> None:
    demo = project(POLICY_TRAINER_MAX_STEPS="6", REF_SERVER_THREADS="1")
    output = demo.compose("--profile", "demo", "up", "--no-build", "--exit-code-from", "trainer").stdout
    assert "step 6/6" in output
    assert demo.until_exited("trainer") == 0
    steps = steps_of(demo.copy("trainer", "/runs/demo", tmp_path / "run"))
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["kl_at_step_0"] < 1e-9
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_prometheus_reads_metrics_with_its_own_token_or_without(
    project: MakeProject, debian_image: Callable[[str], str]
) -> None:
    image = debian_image("prometheus")
    for tokens in ({}, TOKENS):
        port = Project().port
        watched = project(PROMETHEUS_IMAGE=image, PROMETHEUS_PORT=str(port), **tokens)
        watched.compose("--profile", "monitoring", "up", "--detach", "--no-build", "ref-server", "prometheus")
        watched.until_healthy().close()
        watched.until_healthy("prometheus").close()

        def reached(port: int = port) -> bool:
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": "tandem_ready"}).json()
            return [result["value"][1] for result in answer["data"]["result"]] == ["1"]

        until(reached, "Prometheus to read the server's metrics", watched)
        hardened(watched, "prometheus")
        with httpx.Client(base_url=f"http://127.0.0.1:{watched.port}") as http:
            http.headers["Authorization"] = f"Bearer {TOKENS['METRICS_TOKEN']}"
            assert http.get("/v1/queue").status_code == (403 if tokens else 200)


def test_a_queue_on_postgresql(project: MakeProject, debian_image: Callable[[str], str], rollout: Rollout) -> None:
    """The server waits for the database that starts with it, and continues after a restart of the database."""
    shared = project(
        POSTGRES_IMAGE=debian_image("postgresql"), POSTGRES_PASSWORD="of/the@test", POSTGRES_PORT=str(Project().port),
        REF_SERVER_STORE="postgresql://tandem@postgresql/tandem",
    ).up("--profile", "postgresql")  # fmt: skip
    batches = [rollout() for _ in range(2)]
    with shared.until_healthy() as http:
        for batch in batches:
            upload(http, batch)
        leased = lease(http)
        shared.compose("--profile", "postgresql", "restart", "postgresql")
        shared.until_healthy("postgresql").close()
        shared.until_healthy().close()
        assert ack(http, leased) == "ok"
        assert lease(http).headers["Batch-Id"] == batches[1].id
        hardened(shared, "postgresql")
    assert "of/the@test" not in shared.output()


def test_every_profile_is_valid(project: MakeProject) -> None:
    """The directories that the monitoring images mount exist."""
    names = ("gpu", "worker", "workers", "trainer", "demo", "vllm", "postgresql", "monitoring")
    config = project().compose(*(word for name in names for word in ("--profile", name)), "config").stdout
    for service in yaml.safe_load(config)["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["pids_limit"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for path in re.findall(rf"{ROOT}/docker/[\w/]+", config):
        assert Path(path).is_dir()
    assert len(re.findall(rf"{ROOT}/docker/[\w/]+", config)) >= 3
