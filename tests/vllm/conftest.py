"""Real vLLM on the CPU. `make test-vllm` runs these tests in an environment that has it; elsewhere there are none."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from tests.harness.processes import Process
from tests.integration.conftest import base_model, cluster, postgresql, start
from tests.vllm.models import save_tiny
from tests.vllm.serving import VllmServe

__all__ = ["base_model", "cluster", "postgresql", "start"]

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's warnings are not ours to fix


@pytest.fixture(scope="session", autouse=True)
def small_cpu() -> Iterator[None]:
    """One GiB of keys and values, and the routes by which weights are replaced, and adapters loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        yield


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="session")
def tiny(tied: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model, with which engines begin."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", tied=tied, seed=0)


@pytest.fixture
def serve(start: Callable[[Process], Process], tmp_path: Path) -> Callable[..., VllmServe]:
    def make(model: Path, *options: str, extension: type = PackedHead) -> VllmServe:
        server = VllmServe(model, tmp_path / "vllm.log", *options, extension=extension)
        start(server)
        return server.until_ready()

    return make
