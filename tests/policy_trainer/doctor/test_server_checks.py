"""A server that is down, refuses the token, or has another model."""

from pathlib import Path
from typing import Any

import pytest

from policy_trainer.doctor import step_checks as server_checks
from policy_trainer.doctor.step_checks import server
from shared.api import ModelInfo
from shared.errors import UserError
from tests.policy_trainer.doctor.subjects import looked
from tests.ports import free_port
from tests.site import Answer


def test_a_server_that_is_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_checks, "_PATIENCE_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        UserError, match=rf"^server: the reference server at {url} does not answer.*start one with: ref-server serve"
    ):
        looked(server, model, server=url)


def test_a_token_that_is_refused(model: Path, open_site: Any) -> None:
    error = b'{"error": {"code": "unauthorized", "message": "this token is not known", "request_id": "1"}}'
    site = open_site(lambda request: answer(401, error))
    with pytest.raises(UserError, match=r"^server: .*401: this token is not known; give one .*--token-file"):
        looked(server, model, server=site.url)


def test_another_model(model: Path, open_site: Any) -> None:
    about = dict.fromkeys(ModelInfo.model_fields) | {
        "name": "other", "vocabulary_size": 9999, "tokenizer_fingerprint": "other", "max_batch_tokens": 10000,
    }  # fmt: skip
    body = ModelInfo.model_validate(about).model_dump_json().encode()
    results = b'{"results": []}'
    site = open_site(lambda request: answer(200, body if request.path == "/v1/model" else results))
    with pytest.raises(UserError, match=r"^model: the tokenizer of .* is not that of the server's reference other"):
        looked(server, model, server=site.url)


def answer(status: int, body: bytes) -> Answer:
    return Answer(status, body, {"Content-Type": "application/json"})
