"""Settings for all tests."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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

# Whole folders of slow tests: harnesses, and whole processes. Elsewhere each slow test is marked by itself.
SLOW = {"api", "bench", "chaos", "docker", "fuzz", "integration", "load"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks tests as slow by their folder, and those that start a browser."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in SLOW or "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
