"""Which device a worker is told to take, and which others it can see."""

import pytest

from policy_trainer.rollout.device_workers import only_visible


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cpu", ("cpu", {})),
        (None, "cuda:2", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "2"})),
        ("", "cuda:1", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})),
        ("4,GPU-ab,7", "cuda:1", ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-ab"})),
    ],
)
def test_a_worker_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, expected: tuple[str, dict[str, str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert only_visible(device) == expected
