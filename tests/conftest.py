"""Settings for all tests."""

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.device import TEST_DEVICE, TestDevice
from tests.shapes import checked

# Calls of these modules fail if a tensor's shape or dtype, or any other argument, contradicts the annotations.
install_import_hook(
    ["policy_trainer.algorithms.objective", "policy_trainer.algorithms.surrogates.sums", "policy_trainer.learner"],
    f"{checked.__module__}.{checked.__name__}",
)

# The time of an example depends on the machine's load.
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run: no change is refused for a fault that was there before. `make queue-model` explores.
settings.register_profile("repeatable", settings.get_profile("exploring"), derandomize=True)
settings.load_profile("repeatable")

# A shell starts background jobs with SIGINT ignored, and the processes of our tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup does this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Whole folders and files of slow tests: harnesses, whole processes, real waiting. Elsewhere a mark stands at the test.
SLOW = (
    "api",
    "test_benchmarks.py",
    "chaos",
    "docker",
    "fuzz",
    "integration",
    "load",
    "policy_trainer/rollout/environments/test_sessions.py",
    "policy_trainer/processes/test_fork_server.py",
    "policy_trainer/processes/test_keeper.py",
    "policy_trainer/proofs/test_invariance.py",
    "policy_trainer/weights/reference/test_renewal.py",
    "policy_trainer/rewards/test_sandbox.py",
    "policy_trainer/rewards/test_http_reward.py",
    "policy_trainer/supervised/sft/test_sft.py",
    "policy_trainer/trainer/test_plan.py",
    "policy_trainer/weights/published/test_on_server.py",
    "ref_server/http/routes/test_many_leases.py",
    "ref_server/http/routes/test_weights.py",
    "ref_server/http/test_watchers.py",
    "ref_server/scoring/test_loops.py",
    "ref_server/scoring/test_reference.py",
    "ref_server/scoring/test_teacher.py",
    "ref_server/scoring/test_wanted_reference.py",
    "ref_server/test_background.py",
    "shared/test_process.py",
    "shared/test_logs.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if TEST_DEVICE is not None:
        TestDevice(TEST_DEVICE).__enter__()
        # Many tests compare two runs to the bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
        config.addinivalue_line("filterwarnings", "ignore:.*determinis")
        torch.backends.cudnn.allow_tf32 = False  # as matrix products: float32 has its 24 bits


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks tests as slow by their file, and those that start a browser."""
    tests = Path(__file__).parent
    slow = {path for name in SLOW for path in (tests / name, *(tests / name).rglob("test_*.py"))}
    for item in items:
        if item.path in slow or "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
