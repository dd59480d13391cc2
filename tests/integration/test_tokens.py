"""A training run through TLS with a token for it alone, which no file or log contains."""

import subprocess
from pathlib import Path

import pytest
import trustme

from shared.api import State
from shared.client import RefServerClient
from tests.integration.processes import Process, steps_of, until
from tests.integration.runs import QUICK
from tests.ports import free_port

TRAIN = "a-trainers-token-0123456789"
UPLOAD = "a-workers-token-0123456789"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    """A private authority; `cert.pem` and `key.pem` beside it are of a server on this machine."""
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
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    server = start(
        Process(
            "ref_server", "serve", "--model", str(random_model), "--port", str(port), "--threads", "1",
            "--data-dir", str(tmp_path / "server"), "--token-file", str(tokens),
            "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"),
            log=tmp_path / "server.log",
        )
    )  # fmt: skip
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
