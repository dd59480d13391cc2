"""A teacher: every batch is scored by it and by the reference, also after the reference was replaced."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring import frozen_model
from ref_server.scoring.teacher import add_teacher
from ref_server.service.service import Service
from shared import wire
from shared.batch import Batch, TokenGroup
from shared.errors import UserError
from shared.models import load_model, save_model
from tests.device import DEVICE
from tests.ref_server.calls import SAFETENSORS, Rollout, Serve, admit
from tests.ref_server.scoring.changed_models import changed_model
from tests.ref_server.scoring.queued import lease_scored, ref_logps

Start = Callable[..., AbstractContextManager[httpx.Client]]


def teacher_model(**changes: Any) -> PreTrainedModel:
    """Another architecture with the same tokens."""
    torch.manual_seed(3)
    sizes = {**make_model(0).config.to_dict(), "hidden_size": 64, **changes}
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, a snapshot that may replace it, and a teacher."""
    root = tmp_path_factory.mktemp("models")
    save_model(make_model(0), make_tokenizer(), root / "model")
    save_model(changed_model(0.02), make_tokenizer(), root / "snapshots" / "one")
    save_model(teacher_model(), make_tokenizer(), root / "teacher")
    return root


@pytest.fixture
def start(folder: Path, tmp_path: Path, serve: Serve) -> Start:
    """Serves both as the command does, and after a restart the same queue."""

    def start(**settings: Any) -> AbstractContextManager[httpx.Client]:
        given = {"data_dir": tmp_path / "data", "snapshot_root": folder / "snapshots", **settings}
        config = ServeConfig(model=str(folder / "model"), teacher=str(folder / "teacher"), **given)
        return serve(Service(add_teacher(frozen_model.load(config), config), open_queue(config), config))

    return start


@pytest.fixture
def naive_of(folder: Path) -> Callable[[str, Batch], np.ndarray]:
    """(C,) log-probs of a batch by one model of the folder, row by row."""

    def compute(name: str, batch: Batch) -> np.ndarray:
        model = load_model(str(folder / name), revision=None, device=str(DEVICE), dtype="float32")
        return naive(model, batch.group, batch.temperature)

    return compute


def naive(model: PreTrainedModel, group: TokenGroup, temperature: float) -> np.ndarray:
    rows = []
    for completion in group.completions():
        row = torch.tensor(np.concatenate([group.prompt_ids, completion]))
        with torch.no_grad():
            logits = model(input_ids=row[None], use_cache=False).logits[0].double() / temperature
        logps = logits.log_softmax(-1)[torch.arange(len(row) - 1), row[1:]]
        rows.append(logps[len(group.prompt_ids) - 1 :].numpy())
    return np.concatenate(rows)


def teacher_logps(scored: Batch) -> np.ndarray:
    assert scored.teacher_logps is not None
    return scored.teacher_logps


def test_both_score_each_batch(start: Start, naive_of: Any, rollout: Rollout) -> None:
    batches = [rollout(lengths=(3, 5, 1), temperature=0.7), rollout(prompt=2, lengths=(4,))]
    with start() as http:
        admit(http, *batches)
        for batch in batches:
            scored = lease_scored(http)
            assert scored.id == batch.id
            np.testing.assert_allclose(ref_logps(scored), naive_of("model", batch), atol=1e-4)
            np.testing.assert_allclose(teacher_logps(scored), naive_of("teacher", batch), atol=1e-4)
            assert np.abs(teacher_logps(scored) - ref_logps(scored)).max() > 0.1, "two different models"


def test_a_direct_request_has_both_too(start: Start, naive_of: Any, rollout: Rollout) -> None:
    batch = rollout(lengths=(2, 3))
    with start() as http:
        scored = wire.decode(http.post("/v1/logprobs", content=wire.encode(batch), headers=SAFETENSORS).content)
        ids = {
            "prompt_ids": batch.group.prompt_ids.tolist(),
            "completions": [ids.tolist() for ids in batch.group.completions()],
        }
        logprobs = http.post("/v1/logprobs", json=ids).json()["logprobs"]
    assert scored.ref_logps is not None
    np.testing.assert_allclose(teacher_logps(scored), naive_of("teacher", batch), atol=1e-4)
    np.testing.assert_allclose(np.concatenate(logprobs), naive_of("model", batch), atol=1e-4)


def test_a_replacement_and_a_restart_keep_it(start: Start, naive_of: Any, rollout: Rollout) -> None:
    batch, later = rollout(), rollout()
    with start() as http:
        assert http.put("/v1/reference", json={"snapshot": "one", "version": 1}).status_code == 200
        admit(http, batch)
        scored = lease_scored(http)
        assert http.get("/v1/model").json()["teacher"]
    with start() as http:
        admit(http, later)
        again = lease_scored(http)
        while again.id != later.id:  # the first one's lease ended with its server
            again = lease_scored(http)
    for sent, received in ((batch, scored), (later, again)):
        assert received.reference_version == "1"
        np.testing.assert_allclose(ref_logps(received), naive_of("snapshots/one", sent), atol=1e-4)
        np.testing.assert_allclose(teacher_logps(received), naive_of("teacher", sent), atol=1e-4)


@pytest.fixture
def shown(rollout: Rollout) -> Callable[..., Batch]:
    """A batch whose teacher reads a prompt of 6 tokens in place of 2."""

    def make(**fields: Any) -> Batch:
        batch = rollout(prompt=2, **fields)
        ids = np.array([9, 8, 7, 6, 5, 4], np.int64)
        return replace(batch, group=replace(batch.group, teacher_prompt_ids=ids))

    return make


def to_teacher(batch: Batch) -> Batch:
    return replace(batch, group=batch.group.for_teacher())


class TestTeachersPrompt:
    """What a teacher reads in place of the prompt."""

    def test_the_teacher_reads_it_and_the_reference_does_not(self, start: Start, naive_of: Any, shown: Any) -> None:
        batch = shown(lengths=(3, 5, 1), temperature=0.7)
        with start() as http:
            admit(http, batch)
            scored = lease_scored(http)
        np.testing.assert_allclose(ref_logps(scored), naive_of("model", batch), atol=1e-4)
        np.testing.assert_allclose(teacher_logps(scored), naive_of("teacher", to_teacher(batch)), atol=1e-4)

    def test_without_a_teacher_the_model_reads_both(
        self, folder: Path, tmp_path: Path, serve: Serve, naive_of: Any, shown: Any, rollout: Rollout
    ) -> None:
        """Also where other batches share its forward, and once the model has been replaced."""
        config = ServeConfig(model=str(folder / "model"), data_dir=tmp_path, snapshot_root=folder / "snapshots")
        batches = [rollout(lengths=(2, 2)), shown(lengths=(3, 5, 1)), rollout(prompt=3), shown(lengths=(4,))]
        with serve(Service(frozen_model.load(config), open_queue(config), config)) as http:
            admit(http, *batches)
            received = [lease_scored(http) for _ in batches]
            assert http.put("/v1/reference", json={"snapshot": "one", "version": 1}).status_code == 200
            direct = http.post("/v1/logprobs", content=wire.encode(batches[1]), headers=SAFETENSORS).content
        for sent, scored in zip(batches, received, strict=True):
            np.testing.assert_allclose(ref_logps(scored), naive_of("model", sent), atol=1e-4)
            if sent.group.teacher_prompt_ids is None:
                assert scored.teacher_logps is None
            else:
                np.testing.assert_allclose(teacher_logps(scored), naive_of("model", to_teacher(sent)), atol=1e-4)
                assert np.abs(teacher_logps(scored) - ref_logps(scored)).max() > 0.01, "another prompt"
        renewed = naive_of("snapshots/one", to_teacher(batches[1]))
        np.testing.assert_allclose(teacher_logps(wire.decode(direct)), renewed, atol=1e-4)

    @pytest.mark.parametrize(
        ("ids", "status", "words"),
        [
            ([10**6], 422, "teacher_prompt_ids must lie in"),
            ([5] * 400, 413, "a row of 403 tokens; the model's context is"),
            ([5] * 198, 413, "have 201 tokens; max_batch_tokens is 200"),
        ],
    )
    def test_its_limits_are_the_prompt_s(
        self, ids: list[int], status: int, words: str, folder: Path, tmp_path: Path, serve: Serve, rollout: Rollout
    ) -> None:
        most = 200 if "max_batch" in words else 10_000
        config = ServeConfig(model=str(folder / "model"), data_dir=tmp_path, max_batch_tokens=most)
        batch = rollout(prompt=2, lengths=(3,))
        batch = replace(batch, group=replace(batch.group, teacher_prompt_ids=np.array(ids, np.int64)))
        with serve(Service(frozen_model.load(config), open_queue(config), config)) as http:
            answer = http.post("/v1/logprobs", content=wire.encode(batch), headers=SAFETENSORS)
        assert answer.status_code == status and words in answer.text


class TestRefusals:
    def refused(self, folder: Path, teacher: Path) -> str:
        config = ServeConfig(model=str(folder / "model"), teacher=str(teacher))
        with pytest.raises(UserError) as raised:
            add_teacher(frozen_model.load(config), config)
        return str(raised.value)

    def test_another_tokenizer(self, folder: Path, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(["<other>"])
        save_model(teacher_model(), tokenizer, tmp_path / "other")
        message = self.refused(folder, tmp_path / "other")
        assert message.startswith("teacher: the tokenizer of") and "same family" in message

    def test_a_smaller_vocabulary(self, folder: Path, tmp_path: Path) -> None:
        rows = make_model(0).config.vocab_size
        save_model(teacher_model(vocab_size=rows - 1), make_tokenizer(), tmp_path / "small")
        assert f"has a vocabulary of {rows - 1} tokens" in self.refused(folder, tmp_path / "small")

    def test_more_rows_than_tokens_are_no_other_vocabulary(self, folder: Path, tmp_path: Path) -> None:
        """Models of one family often differ in how far their embeddings are padded."""
        rows = make_model(0).config.vocab_size
        save_model(teacher_model(vocab_size=rows + 11), make_tokenizer(), tmp_path / "padded")
        config = ServeConfig(model=str(folder / "model"), teacher=str(tmp_path / "padded"))
        assert add_teacher(frozen_model.load(config), config).info.vocabulary_size == rows
