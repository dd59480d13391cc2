"""An empty queue."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.queue.queue import Queue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with closing(open_queue(ServeConfig(no_model=True, data_dir=tmp_path))) as opened:
        yield opened
