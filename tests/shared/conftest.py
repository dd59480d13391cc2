import os

import pytest
import torch

from tests.fuse import fuse

__all__ = ["fuse"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
