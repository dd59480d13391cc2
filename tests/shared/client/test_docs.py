"""The examples of docs/client.md, run as they stand against a real server."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from ref_server.service.service import Service
from tests.docs.pages import texts
from tests.ref_server.conftest import make_service, model, one_thread, serve, tokenizer

pytestmark = pytest.mark.slow

__all__ = ["make_service", "model", "one_thread", "serve", "tokenizer"]

ROOT = Path(__file__).parents[3]
URL = "http://127.0.0.1:8400"
EXAMPLES = texts("client.md", "python")
# What each of them prints, in order.
PRINTED = (
    r"tiny \{.*\n\[\('5', -\d.*\n\[\('6', -\d.*\n",
    r"True\n\[-\d.*\] \[1\. 0\.\]\n\{'[0-9a-f-]{36}': <Outcome.OK: 'ok'>\}\n",
    r"0 batches of 0\n",
    r"1 \{'next_index': 0\} b'any bytes'\n",
    r"404 not_found id [\w-]+\n",
    r"(\d s: the reference server at \S+ does not answer .*\n)+no server answers at http://127.0.0.1:1 \(.*\)\n",
)


@pytest.fixture(scope="module")
def url(
    make_service: Callable[..., Service], serve: Callable[[Service], AbstractContextManager[httpx.Client]]
) -> Iterator[str]:
    with serve(make_service()) as http:
        yield str(http.base_url)


def test_every_example_is_known() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.mark.parametrize(("example", "printed"), list(zip(EXAMPLES, PRINTED, strict=False)))
def test_an_example(url: str, example: str, printed: str) -> None:
    assert "http://" in example
    code = example.replace(URL, url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(printed, done.stdout, re.DOTALL), done.stdout


def test_the_commands_in_it(url: str, tmp_path: Path) -> None:
    """The block at its end, but for its files."""
    block = (ROOT / "docs" / "client.md").read_text().rpartition("## From the shell")[2]
    commands = re.findall(r"^ref-server .*$", block, re.MULTILINE)
    assert len(commands) == 4
    for command in commands[:2]:
        shell = command.replace("ref-server", f"{sys.executable} -m ref_server", 1)
        done = subprocess.run(["bash", "-c", f"REF_SERVER_URL={url} {shell}"], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
