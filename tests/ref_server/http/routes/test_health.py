"""What compose.yaml runs to learn whether a server is well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.ports import free_port
from tests.harness.server import Server

pytestmark = pytest.mark.slow

COMPOSE = Path(__file__).parents[4] / "compose.yaml"


@pytest.mark.parametrize("proxied", [False, True])
def test_the_server_is_asked_itself(tmp_path: Path, proxied: bool) -> None:
    """Also where Docker gives its containers a proxy, as it does once one is in its config.json."""
    kind, command, *arguments = yaml.safe_load(COMPOSE.read_text())["x-ref-server"]["healthcheck"]["test"]
    assert (kind, command) == ("CMD", "python")
    environment = {**os.environ, **({"HTTP_PROXY": f"http://127.0.0.1:{free_port()}"} if proxied else {})}
    with Server(None, tmp_path) as server:
        replaced = [argument.replace("8400", str(server.http.base_url.port)) for argument in arguments]
        assert subprocess.run([sys.executable, *replaced], env=environment).returncode == 0
