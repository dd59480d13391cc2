"""/openapi.json: statuses, schemas, and commands that work unchanged."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared import wire
from shared.batch import Training
from tests.ref_server.calls import Rollout, admit, lease

Commands = Callable[..., str]

# The address in the commands.
ADDRESS = "localhost:8400"


@pytest.fixture(scope="module")
def page(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def operations(page: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation for path, methods in page["paths"].items() for method, operation in methods.items()
    }


@pytest.fixture
def run_examples(
    http: httpx.Client, operations: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> Callable[..., str]:
    """Runs the curl commands of one operation in a temporary folder; returns what they print."""
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")

    def run(method: str, path: str, **variables: str) -> str:
        (block,) = re.findall(r"```\n(.*?)```", operations[method, path]["description"], re.DOTALL)
        script = "set -e\n" + block.replace(ADDRESS, f"{http.base_url.host}:{http.base_url.port}")
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **variables},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_every_route_documents_its_answers(operations: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    responses = {key: set(operation["responses"]) for key, operation in operations.items()}
    for key, statuses in responses.items():
        assert "```\ncurl " in operations[key]["description"], key
        assert any(status.startswith("2") for status in statuses)
        assert {"401", "403", "408", "413", "422", "429"} <= statuses
    assert {"200", "201", "409", "415", "503", "507"} <= responses["post", "/v1/batches"]
    assert {"200", "204", "409", "503"} <= responses["post", "/v1/batches/lease"]
    assert {"409", "503"} <= responses["post", "/v1/logprobs"]
    assert "503" in responses["get", "/readyz"]
    assert "404" in responses["get", "/v1/batches/{id}"]


def test_only_the_health_routes_need_no_token(
    page: dict[str, Any], operations: Mapping[tuple[str, str], dict[str, Any]]
) -> None:
    assert page["security"] == [{"token": []}]
    assert page["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    open_routes = {path for (_, path), operation in operations.items() if operation.get("security") == []}
    assert open_routes == {"/livez", "/readyz"}


def test_every_reference_resolves(page: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for key, value in node.items() if key == "$ref")
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    for reference in set(references(page)):
        target = page
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def test_commands_that_read(run_examples: Commands, operations: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    """Of every route that reads and takes nothing in its path; a stream does not end by itself."""
    for method, path in operations:
        if method == "get" and "{" not in path and path != "/v1/events":
            assert run_examples("get", path), path


def test_commands_of_a_batch(http: httpx.Client, run_examples: Commands, rollout: Rollout, tmp_path: Path) -> None:
    batch = rollout(run="curl")
    (tmp_path / "batch.safetensors").write_bytes(wire.encode(batch))
    run_examples("post", "/v1/logprobs")
    run_examples("post", "/v1/completions", NAME="tiny")
    assert wire.decode((tmp_path / "scored.safetensors").read_bytes())
    assert batch.id in run_examples("post", "/v1/batches")
    assert batch.id in run_examples("get", "/v1/batches/{id}", ID=batch.id)
    assert batch.id in run_examples("get", "/v1/batches/{id}/tokens", ID=batch.id)
    assert batch.id in run_examples("get", "/v1/batches/{id}/rewards", ID=batch.id)
    tokens = np.zeros(len(batch.group.completion_ids), np.float32)
    (tmp_path / "training.safetensors").write_bytes(wire.encode_training(Training(1, tokens, tokens)))
    for verbs in (["release"], ["extend", "ack"]):
        headers = run_examples("post", "/v1/batches/lease")
        assert wire.decode((tmp_path / "leased.safetensors").read_bytes())
        assert batch.id in run_examples("put", "/v1/batches/{id}/training", ID=batch.id)
        (token,) = re.findall(r"(?i)lease-token: (\S+)", headers)
        for verb in verbs:
            assert '"ok"' in run_examples("post", f"/v1/leases/{verb}", ID=batch.id, TOKEN=token)


def test_commands_of_weights(run_examples: Commands, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    url = "/v1/weights/{run}/{lineage}/{epoch}/{version}"
    assert json.loads(run_examples("put", f"{url}/{{file}}"))["bytes"] == 7
    published = json.loads(run_examples("post", f"{url}/commit"))
    assert (published["version"], published["next_index"]) == (1, 0)
    assert json.loads(run_examples("get", "/v1/weights/{run}")) == published
    assert json.loads(run_examples("get", url)) == published
    (tmp_path / "model.safetensors").write_bytes(b"wei")  # a download that broke off
    run_examples("get", f"{url}/{{file}}")
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_commands_of_metrics(run_examples: Commands) -> None:
    assert json.loads(run_examples("post", "/v1/runs/{run}/metrics")) == {"kept": 1}
    assert json.loads(run_examples("get", "/v1/runs"))["runs"][0]["run"] == "curl"
    assert json.loads(run_examples("get", "/v1/runs/{run}/metrics"))["values"] == {"reward": [0.4], "kl": [0.01]}
    assert json.loads(run_examples("get", "/v1/runs/{run}/metrics/{step}"))["records"][0]["step"] == 12


def test_commands_of_an_operator(http: httpx.Client, run_examples: Commands, rollout: Rollout) -> None:
    batch = rollout(run="stale")
    admit(http, batch)
    while http.get(f"/v1/batches/{batch.id}").json()["state"] != "expired":
        lease(http, "stale", epoch=0, policy_version=9, max_lag=1, wait_seconds=0)
    assert batch.id in run_examples("post", "/v1/batches/{id}/requeue", ID=batch.id)
    while http.get(f"/v1/batches/{batch.id}").json()["state"] == "scoring":
        pass
    run_examples("delete", "/v1/batches/{id}", ID=batch.id)
    assert http.get(f"/v1/batches/{batch.id}").json()["reason"] == "dropped"
    assert json.loads(run_examples("post", "/v1/batches/purge"))["next_cursor"] is None
