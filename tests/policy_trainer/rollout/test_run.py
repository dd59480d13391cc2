"""A worker's server and device."""

from pathlib import Path

import pytest

from policy_trainer.config import RolloutConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.rollout.device_workers import only_visible
from policy_trainer.rollout.run import find_server, stay_with
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import write_address
from shared.settings import from_values


def config_of(run_dir: Path, **settings: str) -> RolloutConfig:
    return from_values(RolloutConfig, model="m", run_dir=run_dir, **settings)


def test_a_named_server_is_taken_as_it_is(tmp_path: Path) -> None:
    config = config_of(tmp_path, server="http://gpu:8400")
    write_address(RunDirectory(tmp_path), 5)

    def wait(reason: str, seconds: float) -> None: ...

    assert find_server(config, wait) == "http://gpu:8400"
    assert stay_with(config, "http://gpu:8400", wait) is wait


def test_it_waits_until_the_trainer_has_started_its_own(tmp_path: Path) -> None:
    waits: list[str] = []

    def wait(reason: str, seconds: float) -> None:
        waits.append(reason)
        if len(waits) == 2:
            write_address(RunDirectory(tmp_path), 5)

    assert find_server(config_of(tmp_path), wait) == "http://127.0.0.1:5"
    assert len(waits) == 2 and f"no server.json in {tmp_path}" in waits[0]


def test_it_ends_when_the_next_trainer_has_another_port(tmp_path: Path) -> None:
    waits: list[str] = []
    write_address(RunDirectory(tmp_path), 5)
    url = find_server(config_of(tmp_path), lambda *_: None)
    wait = stay_with(config_of(tmp_path), url, lambda reason, seconds: waits.append(reason))
    wait("it does not answer", 1.0)
    write_address(RunDirectory(tmp_path), 6)
    with pytest.raises(RunFailed, match=r"at http://127.0.0.1:6 now, not at http://127.0.0.1:5; start this worker"):
        wait("it does not answer", 2.0)
    assert waits == ["it does not answer"]


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cpu", ("cpu", {})),
        (None, "cuda:2", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "2"})),
        ("", "cuda:1", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})),
        ("4,GPU-ab,7", "cuda:1", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-ab"})),
    ],
)
def test_a_worker_sees_only_its_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, expected: tuple[str, dict[str, str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert only_visible(device) == expected
