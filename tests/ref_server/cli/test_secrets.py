"""What must not be printed: passwords, tokens, what clients send. And whose code must not run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ref_server.cli.serve import run as serve
from ref_server.config import ServeConfig
from shared import wire
from shared.batch import Batch
from shared.errors import UserError
from shared.models import load_model, load_tokenizer, save_model
from shared.settings import load_settings
from tests.harness.server import Server
from tests.ref_server.sockets import answer, connected, head

SECRET = "hunter2-hunter2"
TOKEN = "t0ken-of-an-admin"


@pytest.mark.parametrize(
    "store",
    [
        f"postgresql://user:{SECRET}@[::1/db",
        f"postgresql://user:{SECRET}@host:port/db",
        f"postgresql://user:x@{SECRET}@host/db",
        f"postgresql://user:{SECRET}%zz@host/db",
        f"postgresql://host/db?password={SECRET}&surprise=1",
        SECRET,
    ],
)
@pytest.mark.parametrize("source", ["command line", "environment", "file"])
def test_a_store_that_cannot_be_is_not_repeated(
    store: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--no-model"]
    if source == "command line":
        arguments += ["--store", store]
    elif source == "environment":
        monkeypatch.setenv("REF_SERVER_STORE", store)
    else:
        (tmp_path / "file.toml").write_text(f"store = {json.dumps(store)}")
        arguments += ["--config", str(tmp_path / "file.toml")]
    with pytest.raises(SystemExit) as exited:
        serve(arguments)
    output = "".join(capsys.readouterr())
    assert exited.value.code == 2
    assert "store: " in output
    assert SECRET not in output


def refused_start(*options: str) -> str:
    """What a server says that cannot start."""
    command = [sys.executable, "-m", "ref_server", "serve", *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_a_store_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    store = f"postgresql://user:{SECRET}@127.0.0.1:1/tandem?connect_timeout=1"
    config = load_settings(ServeConfig, ["--no-model", "--store", store], prog="ref-server", schema=ServeConfig)
    assert SECRET not in repr(config)
    output = refused_start("--no-model", "--store", store, "--data-dir", str(tmp_path))
    assert "the queue cannot be opened" in output
    assert SECRET not in output


@pytest.mark.parametrize("arguments", [["--token", SECRET], [f"--token={SECRET}"]])
def test_a_token_on_the_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        serve(["--no-model", *arguments])
    output = "".join(capsys.readouterr())
    assert exited.value.code == 2
    assert "set REF_SERVER_TOKEN in the environment" in output
    assert SECRET not in output


@pytest.mark.parametrize("token", ["", "hunter2", f"{SECRET} {SECRET}"])
def test_a_bad_token_is_not_repeated(
    token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REF_SERVER_TOKEN", token)
    with pytest.raises(SystemExit) as exited:
        serve(["--no-model"])
    output = "".join(capsys.readouterr())
    assert exited.value.code == 2
    assert "token: a token " in output
    assert "hunter2" not in output


@pytest.mark.slow
def test_nothing_that_clients_send_is_logged(tmp_path: Path, rollout: Callable[..., Batch]) -> None:
    """At the most talkative level, with requests of every kind: good, bad, broken."""
    file = tmp_path / "tokens"
    file.write_text(f"admin {TOKEN}\n")
    file.chmod(0o644)
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Secret": SECRET}
    options = ("--token-file", str(file), "--log-level", "debug")
    with Server(None, tmp_path, *options, variables={"REF_SERVER_TOKEN": f"{TOKEN}-2"}) as server:
        http = server.http
        good = wire.encode(rollout(sample=json.dumps({"text": SECRET}), run=SECRET))
        for body in (good, good[:-1], SECRET.encode() * 100):
            http.post("/v1/batches", content=body, headers=headers | {"Content-Type": wire.CONTENT_TYPE})
        http.post("/v1/logprobs", json={"prompt": SECRET, "completions": [SECRET]}, headers=headers)
        http.post("/v1/batches/lease", json={"consumer": SECRET, "surprise": SECRET}, headers=headers)
        http.get(f"/v1/batches?cursor={SECRET}&run={SECRET}", headers=headers)
        http.get(f"/v1/batches/{SECRET}?{SECRET}", headers=headers)
        http.get(f"/{SECRET}", headers=headers)
        http.get("/v1/queue", headers={"Authorization": f"Bearer {SECRET}"})
        http.get("/v1/queue", headers=headers | {"Origin": f"http://{SECRET}"})
        for sent in (SECRET.encode() * 100, head(SECRET, f"/{SECRET}", f"{SECRET} {SECRET}")):
            with connected(http) as connection:
                connection.sendall(sent)
                answer(connection)
        with connected(http) as connection:
            connection.sendall(head("POST", "/v1/batches", "Upgrade: websocket", "Connection: upgrade, close", SECRET))
            answer(connection)
        output = server.output()
    assert "request" in output, "it does log them"
    assert "every user of this machine can read the tokens" in output
    assert SECRET not in output
    assert TOKEN not in output


FAILING = """
import sys, structlog
from shared.logs import configure_logs

def fail(prompt):
    raise RuntimeError("cannot be scored")

configure_logs(sys.argv[1])
try:
    fail(sys.argv[2])
except RuntimeError as error:
    structlog.get_logger().error("a batch could not be scored", exc_info=error)
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_values(log_format: str) -> None:
    """The code's lines, not what they worked on."""
    command = [sys.executable, "-c", FAILING, log_format, SECRET]
    output = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert "in fail" in output
    assert SECRET not in output


# A model may contain code


@pytest.fixture
def with_code(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A model directory whose configuration names Python files of the directory to run."""
    directory = tmp_path / "model"
    save_model(model, tokenizer, directory)
    marker = tmp_path / "it ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    code += "from transformers import PretrainedConfig, Qwen2ForCausalLM as M, PreTrainedTokenizerFast as T\n"
    code += "class C(PretrainedConfig):\n    model_type = 'surprise'\n"
    (directory / "surprise.py").write_text(code)
    names = {"AutoConfig": "surprise.C", "AutoModelForCausalLM": "surprise.M", "AutoTokenizer": ["surprise.T", None]}
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(values | {"auto_map": names}))
    return directory


def test_code_of_a_model_is_never_run(with_code: Path) -> None:
    load_model(str(with_code), revision=None, device="cpu", dtype="auto")  # its type is known, and its code unneeded
    load_tokenizer(str(with_code))
    assert not (with_code.parent / "it ran").exists()


def test_a_tokenizer_that_needs_its_code_is_refused(with_code: Path, tmp_path: Path) -> None:
    (with_code / "tokenizer.json").unlink()
    with pytest.raises(UserError):
        load_tokenizer(str(with_code))
    assert not (tmp_path / "it ran").exists()
