"""A trainer's own reference server: its options, where it listens, and what its deaths mean to the run."""

import fcntl
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from policy_trainer.config import DataConfig, LoraConfig, LossConfig, ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.processes import children as restarts
from policy_trainer.processes.lifecycle.endings import RunFailed, Stopped
from policy_trainer.run_files import locks
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_port, read_url
from policy_trainer.trainer import reference_servers
from policy_trainer.trainer.reference_servers import InlineServer, choose_server, reference_device
from ref_server.config import ServeConfig
from shared.errors import UserError
from shared.settings import from_values, load_settings
from tests.harness.processes import until
from tests.policy_trainer.children import Clock, FakeChild


def never(reason: str, seconds: float) -> None:
    raise AssertionError(f"nothing to wait for: {reason}")


class Home:
    """A run's directory, and the servers that a trainer starts there."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(directory)
        self.children: list[FakeChild] = []
        self.notes: list[str] = []
        self.servers: list[InlineServer] = []

    def server(self, *, on_terminal: bool = False, **settings: Any) -> InlineServer:
        config = from_values(TrainConfig, **{"model": "M", "run_dir": self.directory.root, "device": "cpu", **settings})
        made = choose_server(config, self.directory, self.notes.append, on_terminal=on_terminal)
        assert isinstance(made, InlineServer)
        self.servers.append(made)
        return made

    def started(self, **settings: Any) -> InlineServer:
        made = self.server(**settings)
        made.start(never)
        return made

    def option(self, name: str) -> str:
        arguments = self.children[-1].arguments
        return arguments[arguments.index(name) + 1]

    @property
    def token(self) -> str:
        """Of the newest server."""
        return self.children[-1].secrets["REF_SERVER_TOKEN"]

    def answer(self, reason: str, seconds: float) -> None:
        """The child answers a request that waits in the socket which it has inherited."""
        with socket.socket(fileno=os.dup(int(self.option("--fd")))) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Home(tmp_path / "run")

    def child(*arguments: Any) -> FakeChild:
        made.children.append(FakeChild(*arguments))
        return made.children[-1]

    monkeypatch.setattr(reference_servers, "Child", child)
    yield made
    for server in made.servers:
        server.stop()


def test_it_serves_the_model_of_the_run_to_this_machine(home: Home) -> None:
    server = home.started(revision="r1", dtype="bfloat16", threads=2)
    (child,), root = home.children, home.directory.root
    assert (child.module, child.arguments[:5]) == ("ref_server", ["serve", "--model", "M", "--revision", "r1"])
    assert (home.option("--device"), home.option("--dtype"), home.option("--threads")) == ("cpu", "bfloat16", "2")
    assert home.option("--data-dir") == str(root / "server")
    assert home.option("--snapshot-root") == str(server.snapshot_root) == str(root / "snapshots")
    assert child.log == root / "logs" / "ref_server.log"
    assert "--host" not in child.arguments and "--insecure" not in child.arguments, "it only listens on loopback"
    assert server.url == f"http://127.0.0.1:{home.option('--port')}" == read_url(home.directory)
    assert home.option("--fd") == str(child.inherited[1])
    assert home.notes[0].startswith(f"reference server: process 1, on cpu; its dashboard: {server.url} ")


TEACHES_ITSELF = {
    "loss": LossConfig(advantage="distill"),
    "data": DataConfig(teacher_prompt_template="{prompt} {privileged_context}"),
}
ADAPTERS = {"lora": LoraConfig(rank=4), "reference": ReferenceConfig(source="adapter-off")}


@pytest.mark.parametrize(
    ("settings", "served", "loads"),
    [
        ({"loss": LossConfig(beta=0)}, ["--no-model"], "opens its queue"),
        (ADAPTERS, ["--no-model"], "opens its queue"),
        ({"lora": LoraConfig(rank=4)}, ["--model", "M"], "loads M;"),
        ({"loss": LossConfig(advantage="distill", beta=0), "revision": "r"}, ["--model", "T"], "loads T;"),
        (
            {"loss": LossConfig(advantage="distill"), "revision": "r"},
            ["--model", "M", "--teacher", "T", "--revision", "r"], "loads M and T;",
        ),
        ({"loss": LossConfig(distillation_coef=0.5)}, ["--model", "M", "--teacher", "T"], "loads M and T;"),
        ({"loss": LossConfig(distillation_coef=0.5), **ADAPTERS}, ["--model", "T"], "loads T;"),
        ({**TEACHES_ITSELF, "revision": "r"}, ["--model", "M", "--revision", "r"], "loads M;"),
        (TEACHES_ITSELF, ["--model", "M", "--teacher", "T"], "loads M and T;"),
        (
            {**TEACHES_ITSELF, "loss": LossConfig(advantage="distill", beta=0)}, ["--model", "M"], "loads M;",
        ),
        (
            {**TEACHES_ITSELF, "loss": LossConfig(advantage="distill", beta=0)}, ["--model", "T"], "loads T;",
        ),
    ],
)  # fmt: skip
def test_it_serves_the_reference_the_teacher_both_or_neither(
    home: Home, settings: dict[str, Any], served: list[str], loads: str
) -> None:
    teacher = "T" if "T" in served else None
    server = home.started(**settings, **({"teacher": teacher} if teacher else {}))
    arguments = home.children[0].arguments
    assert arguments[1 : arguments.index("--dtype")] == served
    assert loads in server.describe("no answer")


def test_the_token_is_in_a_private_file_and_stays(home: Home) -> None:
    home.started().stop()
    file, token = home.directory.root / "server.json", home.token
    assert json.loads(file.read_text()) == {"url": read_url(home.directory), "token": token} and len(token) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((home.directory.root / "server").stat().st_mode) == 0o700
    assert token not in home.children[0].arguments and token not in home.notes[0] and str(file) in home.notes[0]
    home.started().stop()
    assert home.token == token
    file.chmod(0o644)  # anybody may have read it
    home.started()
    assert home.token != token and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_on_a_terminal_the_link_to_the_dashboard_has_the_token(home: Home) -> None:
    server = home.started(on_terminal=True)
    assert home.notes[0].endswith(f"its dashboard: {server.url}/#token={home.token}")


def test_a_configured_token_is_used_and_neither_shown_nor_written(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("train 0123456789-configured\n")
    server = home.started(on_terminal=True, token_file=file)
    assert home.token == "0123456789-configured"
    assert home.notes[0].endswith(f"its dashboard: {server.url}")
    assert json.loads((home.directory.root / "server.json").read_text()) == {"url": server.url}


def test_the_next_trainer_takes_the_same_port_if_it_is_free(home: Home) -> None:
    first = home.started()
    first.stop()
    second = home.started()
    assert second.url == first.url
    second.stop()
    token = home.token
    with socket.create_server(("127.0.0.1", read_port(home.directory) or 0)):
        assert home.started().url != first.url
    assert home.token != token, "what has the port may have been sent the token"


def test_nobody_else_can_take_its_port_before_it_serves_or_after_it_died(home: Home) -> None:
    home.started()
    for _ in range(2):
        for host in ("127.0.0.1", "0.0.0.0"):
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                with pytest.raises(OSError, match="in use"):
                    thief.bind((host, int(home.option("--port"))))
        home.children[0].die(1)


def test_it_waits_for_the_server_of_a_killed_trainer(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    data = home.directory.root / "server"
    data.mkdir(parents=True)
    earlier = (data / "process.lock").open("wb")
    fcntl.flock(earlier, fcntl.LOCK_EX)
    waits: list[str] = []

    def wait(reason: str, seconds: float) -> None:
        waits.append(reason)
        if len(waits) == 3:
            earlier.close()

    home.server().start(wait)
    assert len(waits) == 3 and "an earlier trainer is still ending" in waits[0] and home.children[0].pid == 1


def test_but_not_for_one_of_a_living_trainer(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "time", Clock())
    home.started()
    with pytest.raises(UserError, match="run_dir: the reference server of another trainer still works in"):
        home.server().start(lambda reason, seconds: None)

    def stop(reason: str, seconds: float) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        home.server().start(stop)


def test_one_that_never_answered_ends_the_run_with_its_last_output(home: Home) -> None:
    server = home.started()
    server.check()

    def wait(reason: str, seconds: float) -> None:
        assert "process 1) loads M; its log is" in server.describe(reason)
        home.children[0].die(1)

    for _ in range(2):
        with pytest.raises(RunFailed, match=r"(?s)reference server died with status 1.*I cannot go on.*ref_server.log"):
            server.await_answer(wait)


def test_one_that_dies_under_a_request_is_started_again_by_itself(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(restarts, "time", clock)
    server = home.started()
    server.await_answer(home.answer)
    with socket.create_connection(("127.0.0.1", int(home.option("--port")))) as request:
        request.sendall(b"GET")
        home.children[0].die(1)
        until(lambda: home.notes[-1].endswith("starting it again"))
        clock.now += 2
        until(lambda: home.children[0].pid == 2)
        home.answer("", 0.0)
        assert request.recv(4) == b"HTTP"


def test_where_it_cannot_be_started_again_requests_fail(home: Home) -> None:
    server = home.started()
    server.await_answer(home.answer)
    with socket.create_connection(("127.0.0.1", int(home.option("--port")))) as request:
        home.children[0].die(2)
        with pytest.raises(ConnectionError):
            request.recv(1)
    with pytest.raises(RunFailed, match="died with status 2"):
        server.check()


def test_one_that_has_answered_is_started_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(restarts, "time", clock)
    server = home.started()
    server.await_answer(home.answer)
    for _ in range(7):  # far apart
        clock.now += 1000
        home.children[0].die(1)
        server.check()
        clock.now += 1.01
        server.check()
    assert home.children[0].pid == 8 and "starting it again" in home.notes[-1]
    with pytest.raises(RunFailed, match="it died 5 times"):
        for _ in range(5):
            home.children[0].die(1)
            server.check()
            clock.now += 20
            server.check()


@pytest.mark.parametrize(
    ("reference", "policy", "gpus", "chosen"),
    [
        ("auto", "cpu", 4, "cpu"),
        ("auto", "cuda", 1, "cuda"),
        ("auto", "cuda:0", 1, "cuda:0"),
        ("auto", "cuda", 4, "cuda:3"),
        ("auto", "cuda:3", 4, "cuda:2"),
        ("auto", "auto", 0, "cpu"),
        ("cpu", "cuda:0", 4, "cpu"),
        ("cuda:1", "cpu", 4, "cuda:1"),
    ],
)
def test_where_the_reference_runs(
    reference: str, policy: str, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert reference_device(reference, policy) == chosen


def test_the_limits_follow_from_the_pictures_that_a_prompt_may_have(home: Home) -> None:
    """Qwen2.5-VL turns 28 x 28 pixels into a token, from 4 patches with 1,176 values: three pictures of 1.2 megapixels
    are 4,600 tokens and 87 MB, more than the 64 MiB that a server accepts by default."""
    config = AutoConfig.for_model("qwen2_5_vl")
    with torch.device("meta"):
        policy = AutoModelForImageTextToText.from_config(config)
    sampling = SamplingConfig(num_generations=8, max_completion_length=1024)
    made = home.server(data={"max_prompt_length": 5000}, sampling=sampling, groups_per_step=4)
    made.start(never, policy)
    serve = load_settings(ServeConfig, home.children[-1].arguments[1:], prog="ref-server", schema=ServeConfig)
    assert 5000 * 4 * 1176 * 4 <= serve.max_image_bytes < 5000 * 4 * 1176 * 4 + 2**21
    assert serve.max_body_mib * 2**20 > serve.max_image_bytes + 16 * (5000 + 8 * 1024)
    assert serve.queue.limits.max_bytes_per_run >= 12 * serve.max_image_bytes  # three steps of four groups


def test_the_limits_allow_for_sampling_masks(home: Home) -> None:
    sampling = SamplingConfig(num_generations=8, max_completion_length=16_384, top_p=0.9)
    home.server(sampling=sampling).start(never, None)
    serve = load_settings(ServeConfig, home.children[-1].arguments[1:], prog="ref-server", schema=ServeConfig)
    assert serve.max_body_mib * 2**20 > 8 * 16_384 * 512 * 4
    assert serve.max_image_bytes <= serve.max_body_mib * 2**20


def test_a_run_without_pictures_has_the_servers_usual_limits(home: Home) -> None:
    home.started()
    assert "--max-body-mib" not in home.children[-1].arguments
