"""Access: a run through TLS with a token of its own, and what those who may publish weights cannot do to workers."""

import json
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trustme

from policy_trainer.weights.published.publication import Publication
from policy_trainer.weights.published.publisher import SETTINGS, upload_directory
from shared.api import State
from shared.client import RefServerClient
from tests.harness.processes import Process, until
from tests.harness.runs import QUICK, steps_of
from tests.harness.server import Server
from tests.site import Answer, Request, open_site

TRAIN = "a-trainers-token-0123456789"
UPLOAD = "a-workers-token-0123456789"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    """A private authority; next to it, `cert.pem` and `key.pem` of a server on this machine."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return tmp_path / "ca.pem"


def test_training_with_a_token_over_tls(random_model, tmp_path, start, ca, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"train {TRAIN} name=trainer run=secret\nupload {UPLOAD} run=secret\n")
    tokens.chmod(0o600)
    pair = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    trusting = ssl.create_default_context(cafile=ca)
    server = start(Server(random_model, tmp_path, "--token-file", str(tokens), *pair, tls=trusting))
    url = server.url
    run_dir = tmp_path / "secret"

    def train(*options: str) -> Process:
        return start(
            Process(
                "policy_trainer", "train", "--model", str(random_model), "--server", url, "--run-dir", str(run_dir),
                *QUICK, "--max-steps", "2", *options, log=tmp_path / "train.log",
            )
        )  # fmt: skip

    with RefServerClient(url, token=TRAIN, ca=ca) as client:
        until(lambda: client.not_ready_reason() is None, "the server to be ready", server)
        untrusted = train()
        assert untrusted.wait() == 1 and "--tls-ca" in untrusted.output()
        monkeypatch.setenv("POLICY_TRAINER_TOKEN", UPLOAD)
        small = train("--tls-ca", str(ca), "--resume")
        monkeypatch.delenv("POLICY_TRAINER_TOKEN")
        assert small.wait() == 1 and "a token of role train" in small.output()
        assert "held-out accuracy" not in small.output(), "it is refused before the first evaluation"
        unknown = train("--tls-ca", str(ca), "--resume")
        assert unknown.wait() == 1 and "POLICY_TRAINER_TOKEN" in unknown.output()
        monkeypatch.setenv("POLICY_TRAINER_TOKEN", TRAIN)
        trainer = train("--tls-ca", str(ca), "--resume")
        monkeypatch.delenv("POLICY_TRAINER_TOKEN")
        assert trainer.wait() == 0, trainer.output()
        trained = {id for record in steps_of(run_dir) for id in record["batch_ids"]}
        assert trained == {batch.id for batch in client.batches(State.DONE)} != set()
    tokens.unlink()
    assert subprocess.run(["grep", "--recursive", "--files-with-matches", TRAIN, tmp_path]).returncode == 1


__all__ = ["open_site"]


SECRET = "secret-of-the-reward-server"
SMALL = {"num_generations": 2, "prompts_per_round": 1, "max_completion_length": 4}


@pytest.fixture
def server(random_model: Path, tmp_path: Path, start: Any) -> Server:
    return start(Server(random_model, tmp_path / "server")).until_ready()


@pytest.fixture
def worker(
    server: Server, random_model: Path, tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Process]:
    """Publishes weights with these settings, and starts a worker that knows only the server and the run's name."""

    def make(settings: dict[str, Any], *options: str, token: str | None = SECRET) -> Process:
        publication = Publication("run", 0, 1, next_index=0, max_waiting=8, lineage="first")
        with RefServerClient(server.url) as client:
            files = upload_directory(client, publication.address, random_model)
            words = {**asdict(publication), SETTINGS: {"sampling": SMALL, **settings}}
            client.commit_weights(publication.address, files, words)
        monkeypatch.delenv("TANDEM_REWARDS_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("TANDEM_REWARDS_TOKEN", token)
        return start(
            Process(
                "policy_trainer", "rollout", "--server", server.url, "--run", "run", "--threads", "1",
                "--run-dir", str(tmp_path / "worker"), *options, log=tmp_path / "worker.log",
            )
        )  # fmt: skip

    return make


def refusal(worker: Process) -> str:
    assert worker.wait() == 2, worker.output()
    assert "Traceback" not in worker.output()
    return worker.output()


def test_a_published_function_is_not_called(worker: Callable[..., Process], tmp_path: Path) -> None:
    ran, problems = tmp_path / "ran", tmp_path / "problems.jsonl"
    rows = ({"prompt": f"{number}+1", "answer": "2", "cmd": f"touch {ran}"} for number in range(20))
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task": "jsonl", "data": {"path": str(problems)}, "rewards": ["subprocess:getoutput"]}
    message = refusal(worker(settings))
    assert "--rewards" in message and "--data.path" in message and "--trust-settings" in message
    assert not ran.exists()
    assert not list((tmp_path / "worker").rglob("*.safetensors"))  # refused before anything was downloaded


def judge(request: Request) -> Answer:
    return Answer(200, json.dumps({"rewards": [0.0] * len(json.loads(request.body)["samples"])}).encode())


@pytest.mark.long
def test_a_published_url_gets_neither_prompts_nor_the_token(worker: Callable[..., Process], open_site: Any) -> None:
    site = open_site(judge)
    settings = {"rewards": [f"{site.url}/judge"]}
    assert "--rewards" in refusal(worker(settings))
    # The token is sent only to servers of the worker's own configuration, even if it trusts the settings.
    assert "TANDEM_REWARDS_TOKEN" in refusal(worker(settings, "--trust-settings"))
    assert not site.requests
    trusting = worker(settings, "--trust-settings", token=None)
    until(lambda: site.requests, "the server of a trusted publication to be asked", trusting)
    assert not any("authorization" in request.headers for request in site.requests)
