"""Which runs have a fork server, and how long it stays."""

from typing import Any
from unittest.mock import Mock

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.processes import fork_server as module
from policy_trainer.processes.fork_server import fork_server, prepare_fork_server


@pytest.mark.parametrize(
    ("settings", "gpu", "starts"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cpu", "reference": {"device": "cuda:0"}}, True, False),
        ({"device": "cuda:0"}, True, False),
        ({"loss": {"beta": 0}}, False, True),  # for the worker
        ({"sampler": "vllm"}, False, True),  # for the reference server
        ({"sampler": "vllm", "loss": {"beta": 0}}, False, False),
        ({"rollout": "external"}, False, True),
        ({"rollout": "external", "server": "http://gpu1:8400"}, False, False),
    ],
)
def test_a_fork_server_is_for_children_that_use_pytorch_on_the_cpu(
    made_servers: list[Mock], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpu: bool, starts: bool
) -> None:
    monkeypatch.setattr(module, "_may_have_gpu", lambda: gpu)
    with fork_server(TrainConfig(**{"model": "m", **settings})) as forks:
        assert (forks is not None) is starts and len(made_servers) == starts


@pytest.fixture
def made_servers(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """All fork servers that are started."""
    servers: list[Mock] = []
    monkeypatch.setattr(module, "ForkServer", lambda environment: servers.append(Mock()) or servers[-1])
    monkeypatch.setattr(module, "_kept", [])
    return servers


def test_a_fork_server_stays_for_the_next_run(made_servers: list[Mock]) -> None:
    config = TrainConfig(model="m", device="cpu")
    prepare_fork_server("cpu")
    for _ in range(2):
        with fork_server(config) as forks:
            assert forks is made_servers[0]
    made_servers[0].serves.return_value = False  # it was killed, or a variable that PyTorch reads has changed
    with fork_server(config) as forks:
        assert forks is made_servers[1] and made_servers[0].close.called


def test_one_fork_server_stays(made_servers: list[Mock]) -> None:
    """Another trainer is made during a run."""
    with fork_server(TrainConfig(model="m", device="cpu")):
        prepare_fork_server("cpu")
    assert [server.close.called for server in made_servers] == [True, False]


def test_a_fork_server_ends_with_a_run_that_leaves_children(made_servers: list[Mock]) -> None:
    with pytest.raises(KeyboardInterrupt), fork_server(TrainConfig(model="m", device="cpu")):
        made_servers[0].idle = False
        raise KeyboardInterrupt  # while they were being stopped
    assert made_servers[0].close.called
    with fork_server(TrainConfig(model="m", device="cpu")) as forks:
        assert forks is made_servers[1]


def test_ranks_of_torchrun_have_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with fork_server(TrainConfig(model="m", device="cpu")) as forks:
        assert forks is None
