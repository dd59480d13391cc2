"""`python -m ref_server serve` as a process: how it starts, refuses to, ends, and comes back."""

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import structlog
import torch

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from ref_server.__main__ import main
from ref_server.cli.serve import describe_store
from ref_server.cli.serve import run as serve
from ref_server.config import ServeConfig
from ref_server.queue.sqlite.store import SqliteQueue
from shared import wire
from shared.batch import Batch
from shared.models import save_model
from tests.harness.ports import free_port
from tests.harness.server import Server
from tests.ref_server.queue.backends import make_limits

Rollout = Callable[..., Batch]


def upload(http: httpx.Client, batch: Batch) -> None:
    headers = {"Content-Type": wire.CONTENT_TYPE}
    assert http.post("/v1/batches", content=wire.encode(batch), headers=headers).status_code == 201


def lease(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/batches/lease", json={"consumer": "c", "wait_seconds": 15, "lease_seconds": 60})


@pytest.mark.slow
def test_a_queue_outlives_its_server(model_dir: Path, tmp_path: Path, rollout: Rollout) -> None:
    leased, waiting, last = rollout(), rollout(), rollout()
    with Server(model_dir, tmp_path) as server:
        http = server.http
        upload(http, leased)
        keys = [{"id": leased.id, "token": lease(http).headers["Lease-Token"]}]

        # A long poll waits on an empty queue while the process gets SIGTERM.
        poll = socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60)
        body = b'{"consumer": "poll", "wait_seconds": 60}'
        head = (
            "POST /v1/batches/lease HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        poll.sendall(head.encode() + body)
        time.sleep(0.3)
        upload(http, waiting)
        assert b"200 OK" in poll.recv(100)
        poll.sendall(head.encode() + body)
        time.sleep(0.3)

        started = time.monotonic()
        server.popen.terminate()
        assert server.popen.wait(timeout=60) in (0, -signal.SIGTERM)
        assert time.monotonic() - started < 30
        assert "Traceback" not in server.output()
        assert f"url={str(http.base_url).rstrip('/')}" in server.output()
        with poll:
            poll.recv(2**20)

    with Server(model_dir, tmp_path) as server:
        states = {batch["id"]: batch["state"] for batch in server.http.get("/v1/batches").json()["batches"]}
        assert states == {leased.id: "leased", waiting.id: "leased"}
        results = server.http.post("/v1/leases/ack", json={"leases": keys}).json()["results"]
        assert [result["outcome"] for result in results] == ["ok"]
        upload(server.http, last)  # the block ends with kill -9

    with Server(model_dir, tmp_path) as server:
        assert lease(server.http).headers["Batch-Id"] == last.id
        assert server.http.get(f"/v1/batches/{leased.id}").json()["state"] == "done"


@pytest.mark.slow
def test_a_queue_without_a_model(tmp_path: Path, rollout: Rollout) -> None:
    batch = rollout()
    with Server(None, tmp_path) as server:
        upload(server.http, batch)
        assert "/libtorch" not in Path(f"/proc/{server.popen.pid}/maps").read_text()
    with Server(None, tmp_path) as server:
        assert wire.content_hash(lease(server.http).content) == wire.content_hash(wire.encode(batch))
        server.popen.terminate()
        server.popen.wait(timeout=60)
        assert "Traceback" not in server.output()


@pytest.fixture
def restored_logs() -> Iterator[None]:
    """Undoes what a server does to the logs of its process."""
    before, configured = logging.getLogger().handlers.copy(), structlog.get_config()
    hooks = sys.excepthook, threading.excepthook
    yield
    structlog.configure(**configured)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    logging.getLogger().handlers = [known for known in logging.getLogger().handlers if known in before]
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


@pytest.mark.usefixtures("restored_logs")
def test_a_second_server_keeps_off(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits())):
        assert serve(["--model", str(model_dir), "--data-dir", str(tmp_path), "--port", str(free_port())]) == 1
    output = capsys.readouterr().err
    assert "the queue cannot be opened" in output
    assert f"another process holds {tmp_path}" in output


@pytest.mark.usefixtures("restored_logs")
def test_a_teacher_that_is_missing(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(model_dir), "--teacher", str(tmp_path / "nothing"), "--data-dir", str(tmp_path)]
    assert serve([*options, "--port", str(free_port())]) == 1
    assert "teacher: there is no directory" in capsys.readouterr().err


@pytest.mark.usefixtures("restored_logs")
def test_a_port_that_is_taken(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve(["--model", str(model_dir), "--data-dir", str(tmp_path), "--port", str(port)]) == 1
    output = capsys.readouterr().err
    assert "address already in use" in output
    assert str(port) in output
    assert "--port" in output, "it says what to do"
    assert "loading a model" not in output, "it says so before that, which can take minutes"
    SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits()).close()  # nothing is left held


def damaged(model_dir: Path, directory: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_bytes((model_dir / name).read_bytes())
    (directory / "model.safetensors").write_bytes(b"garbage" * 9)
    return directory


def not_a_number(model_dir: Path, directory: Path) -> Path:
    """A model whose weights are NaN: no way of scoring with it can be right."""
    broken = make_model(0)
    with torch.no_grad():
        broken.get_input_embeddings().weight.fill_(torch.nan)  # type: ignore[operator]
    save_model(broken, make_tokenizer(), directory)
    return directory


@pytest.mark.usefixtures("restored_logs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model /nowhere/at/all", "there is no directory /nowhere/at/all"),
        ("--model {damaged}", "cannot be loaded: "),
        ("--model {not_a_number}", "the model cannot be served"),
        ("--model {model_dir} --device cuda:99", "device: there is no cuda:99 here"),
        ("--model {model_dir} --device gpu", "device: 'gpu' is no device"),
        ("--model {model_dir} --data-dir {model_dir}/config.json", "the queue cannot be opened"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # the data directory is .tandem in the working directory
    made = {make.__name__: make for make in (damaged, not_a_number)}
    paths = {name: make(model_dir, tmp_path) for name, make in made.items() if name in arguments}
    assert serve(arguments.format(model_dir=model_dir, **paths).split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m --host 0.0.0.0", "host: 0.0.0.0"),
        ("--model m --surprise 1", "--surprise"),
        ("--model m --queue.max-batches 0", "queue.max_batches: "),
        ("--model m --store mysql://host/db", "store: must be sqlite or postgresql://"),
        ("--model m --store postgresql://[::1/db", "store: is not a URL that PostgreSQL takes"),
        ("--model m --max-body-mib 64 --queue.max-mib-per-run 32", "max_body_mib: 64 is more than the queue"),
        (
            "--model m --queue.max-mib 200 --queue.max-stored-mib 199",
            "max_stored_mib: 199 must be at least max_mib (200)",
        ),
        ("", "either --model PATH_OR_HUB_ID, or --no-model"),
    ],
)
def test_invalid_settings(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as exited:
        serve(arguments.split())
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["fly"], 2)])
def test_the_command_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["ref-server", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == status
    printed = "".join(capsys.readouterr())
    assert "usage: ref-server [-h] [--version] COMMAND" in printed and "serve" in printed


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("sqlite", "sqlite in .tandem"),
        ("postgresql://me:secret@db.example:5433/queue", "postgresql queue on db.example:5433"),
        ("postgresql:///queue?user=me&password=secret", "postgresql queue on this machine:5432"),
    ],
)
def test_the_description_of_a_store_leaves_out_its_password(store: str, expected: str) -> None:
    assert describe_store(ServeConfig(no_model=True, store=store)) == expected
