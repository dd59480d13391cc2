"""A server without a model: a queue that leases batches as they were uploaded."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ref_server.cli.queue.tables import token_sheet
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.queue.records import Upload
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.api import TokensView
from shared.batch import Batch, TokenGroup
from shared.errors import UserError
from tests.ref_server.calls import Rollout, Serve, error, lease, lease_key, settle, upload


def open_service(data_dir: Path) -> Service:
    config = ServeConfig(no_model=True, data_dir=data_dir, max_batch_tokens=1000)
    return Service(NoReferenceModel(config), open_queue(config), config)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[httpx.Client]:
    with serve(open_service(tmp_path_factory.mktemp("data"))) as client:
        yield client


def test_an_upload_is_leased_at_once_and_unchanged(plain: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="at once")
    admitted = upload(plain, batch)
    assert (admitted.status_code, admitted.json()["state"]) == (201, "ready")
    assert upload(plain, batch).status_code == 200
    leased = lease(plain, "at once", wait_seconds=0)
    assert wire.content_hash(leased.content) == wire.content_hash(wire.encode(batch))
    assert isinstance(wire.decode(leased.content), Batch)
    assert settle(plain, "ack", [lease_key(leased)]) == ["ok"]
    history = plain.get(f"/v1/batches/{batch.id}").json()["history"]
    assert [event["state"] for event in history] == ["ready", "leased", "done"]


def test_what_a_server_without_a_model_reports(plain: httpx.Client) -> None:
    assert plain.get("/readyz").status_code == 200
    metrics = plain.get("/metrics").text
    assert "tandem_scored_batches_total" in metrics
    assert "tandem_scored_batches_total{" not in metrics, "no device scores"
    assert plain.get("/v1/queue").json()["scoring"]["tokens_per_second"] == 0
    model = plain.get("/v1/model").json()
    assert (model.pop("max_batch_tokens"), model.pop("max_image_bytes")) == (1000, 64 * 2**20)
    assert {"name", "vocabulary_size", "tokenizer_fingerprint", "reference_version"} < set(model)
    assert set(model.values()) == {None}


@pytest.mark.parametrize(
    "body",
    [{"prompt": "2+3=", "completions": ["5"]}, {"prompt_ids": [1], "completions": [[2, 3]]}],
)
def test_scoring_is_refused_with_the_remedy(plain: httpx.Client, body: dict[str, Any]) -> None:
    detail = error(plain.post("/v1/logprobs", json=body), 409)
    assert detail["code"] == "no_model"
    assert "--model" in detail["message"]


def group(prompt: list[int], completion: list[int]) -> TokenGroup:
    return TokenGroup(np.array(prompt), np.array(completion), np.array([len(completion)]))


@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        (group([2**62], [2**62]), 201),  # any vocabulary
        (group([1], [1] * 999), 201),  # any context
        (group([1], [1] * 1000), 413),
        (group([1], [-1]), 422),
    ],
)
def test_uploads_are_checked_without_a_model(
    plain: httpx.Client, rollout: Rollout, tokens: TokenGroup, status: int
) -> None:
    batch = rollout(run="checked", lengths=tuple(tokens.completion_lengths), group=tokens)
    answer = upload(plain, batch)
    assert answer.status_code == status
    assert status == 201 or answer.json()["error"]["field"] == "completion_ids"


def test_tokens_are_shown_without_their_texts(plain: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="shown", lengths=(2, 1))
    upload(plain, batch)
    shown = plain.get(f"/v1/batches/{batch.id}/tokens").json()
    assert shown["prompt"] == {"text": None, "ids": batch.group.prompt_ids.tolist()}
    assert [row["ids"] for row in shown["rows"]] == [ids.tolist() for ids in batch.group.completions()]
    assert [(row["text"], row["tokens"]) for row in shown["rows"]] == [(None, [None, None]), (None, [None])]
    console = Console(width=80)
    with console.capture() as printed:
        console.print(token_sheet(TokensView.model_validate(shown)))
    assert " ".join(map(str, batch.group.prompt_ids)) in printed.get()


def test_unscored_batches_are_warned_about(tmp_path: Path, rollout: Rollout, serve: Serve, capsys: Any) -> None:
    config = ServeConfig(no_model=True, data_dir=tmp_path)
    queue = open_queue(config)
    queue.put(Upload("left", b"." * 32, "run", 0, 0, 5, 3, 1, wire.encode(rollout())))
    queue.close()
    with serve(open_service(tmp_path)) as http:
        assert http.get("/v1/queue").json()["states"]["queued"]["batches"] == 1
    output = capsys.readouterr().out
    assert "batches wait to be scored" in output and "batches=1" in output


@pytest.mark.slow
def test_a_queue_and_its_commands_do_not_load_pytorch() -> None:
    modules = "ref_server.cli.serve, ref_server.cli.queue.changes, ref_server.cli.ping, ref_server.cli.score"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_tokenizer_shows_texts_without_a_model(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(tmp_path)
    queue_only = NoReferenceModel(ServeConfig(no_model=True, tokenizer=tmp_path))
    ids = tokenizer.encode("2+3=?", add_special_tokens=False)
    assert queue_only.decode(ids) == "2+3=?" and queue_only.token_texts(ids) == ["2", "+", "3", "=", "?"]
    assert queue_only.token_texts([10**6]) == [""] and queue_only.token_texts([2**40]) == [None]
    assert queue_only.decode([2**40]) is None


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer: .*tokenizer.json cannot be read"):
        NoReferenceModel(ServeConfig(no_model=True, tokenizer=tmp_path))
    with pytest.raises(ValidationError, match="tokenizer: a model has its own"):
        ServeConfig(model="somewhere", tokenizer=tmp_path)
