"""The loop of docs/pieces.md, run as it stands but for a tiny model and its server."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ref_server.service.service import Service
from shared.models import save_model
from tests.docs.pages import texts
from tests.ref_server.conftest import make_service, model, serve, tokenizer

__all__ = ["make_service", "model", "serve", "tokenizer"]

(EXAMPLE,) = texts("pieces.md", "python")


def test_the_loop(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    make_service: Callable[..., Service],
    serve: Callable[[Service], AbstractContextManager[httpx.Client]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(model, tokenizer, tmp_path)
    with serve(make_service()) as http:
        code = EXAMPLE.replace("64", "8").replace('"auto"', '"cpu"')  # before paths, which may have such digits
        code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path))
        exec(code.replace("http://127.0.0.1:8400", str(http.base_url)), {"__name__": "__main__"})
    steps = re.findall(r"^step (\d+): reward (\S+), KL (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == list(range(10))
    kls = [float(kl) for _, _, kl in steps]
    assert abs(kls[0]) < 1e-9 < max(kls)  # it begins as the reference, and leaves it
