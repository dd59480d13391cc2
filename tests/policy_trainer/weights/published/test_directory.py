"""Published weights: the version that latest.json names is always there and complete."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import Probe
from policy_trainer.learner.adapters import save_policy
from policy_trainer.rollout.sampling.hf import load_weights
from policy_trainer.weights.published.directory import WeightsDirectory
from policy_trainer.weights.published.publication import Publication
from shared.models import copy_state

Make = Callable[..., PreTrainedModel]
Publish = Callable[..., None]
READER = "0-of-1"


def publication(version: int, *, epoch: int = 0, finished: bool = False) -> Publication:
    return Publication("test", epoch, version, next_index=version * 10, max_waiting=12, finished=finished)


def same(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    other_state = other.state_dict()
    return all(torch.equal(tensor, other_state[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def publish(tokenizer: PreTrainedTokenizerFast) -> Publish:
    def publish(model: PreTrainedModel, directory: Path, publication: Publication) -> None:
        save = partial(save_policy, model, tokenizer, state=copy_state(model))
        WeightsDirectory(directory).publish(save, publication)

    return publish


def load(model: PreTrainedModel, directory: Path, publication: Publication) -> None:
    with WeightsDirectory(directory).reading(publication, READER) as weights:
        load_weights(model, weights)


class TestRoundTrip:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights(
        self, tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tied: bool, dtype: torch.dtype
    ) -> None:
        model, other = make_tiny(seed=1, tied=tied), make_tiny(seed=2, tied=tied)
        for either in (model, other):
            torch.nn.Module.to(either, dtype)
        expected = copy_state(model)
        save = partial(save_policy, model, tokenizer, state=copy_state(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the learner has gone on by the time the copy is saved
        WeightsDirectory(tmp_path).publish(save, publication(3))
        load(other, tmp_path, publication(3))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
        size = (tmp_path / publication(3).name / "model.safetensors").stat().st_size
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        assert size < parameters + 10_000, "tied weights are saved once"
        head, embedding = other.get_output_embeddings(), other.get_input_embeddings()
        assert (head.weight is embedding.weight) is tied  # type: ignore[union-attr]

    def test_an_architecture_that_is_saved_in_another_layout(self, tmp_path: Path, publish: Publish) -> None:
        """transformers computes with the experts of a layer in one tensor, and saves each apart."""
        config = MixtralConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=2, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
        publish(model, tmp_path, publication(3))
        load(other, tmp_path, publication(3))
        assert same(model, other)

    def test_its_description(self, tmp_path: Path, make_tiny: Make, publish: Publish) -> None:
        assert WeightsDirectory(tmp_path / "not there").newest() is None
        published = replace(
            publication(3, epoch=2, finished=True), probe=Probe([1, 2], [[3], [4, 5]], [-0.1, -0.2, -0.3])
        )
        publish(make_tiny(), tmp_path, published)
        assert WeightsDirectory(tmp_path).newest() == published

    def test_of_fewer_layers_does_not_fit(self, tmp_path: Path, make_tiny: Make, publish: Publish) -> None:
        publish(make_tiny(layers=1), tmp_path, publication(0))
        with pytest.raises(RuntimeError, match=r"has no weights for model\.layers\.1"):
            load(make_tiny(layers=2), tmp_path, publication(0))


def test_the_end_of_a_run_writes_no_weights_again(tmp_path: Path, make_tiny: Make, publish: Publish) -> None:
    publish(make_tiny(), tmp_path, publication(3))
    weights = tmp_path / publication(3).name / "model.safetensors"
    written = weights.stat().st_ino
    publish(make_tiny(), tmp_path, publication(3, finished=True))
    newest = WeightsDirectory(tmp_path).newest()
    assert newest is not None and newest.finished
    assert weights.stat().st_ino == written


def test_only_the_newest_are_kept_and_a_new_epoch_is_newer_whatever_its_version(
    tmp_path: Path, make_tiny: Make, publish: Publish
) -> None:
    model = make_tiny()
    for epoch, version in ((0, 40), (0, 144), (1, 9), (1, 10)):
        publish(model, tmp_path, publication(version, epoch=epoch))
        newest = WeightsDirectory(tmp_path).newest()
        assert newest is not None and newest.version == version
        assert (tmp_path / newest.name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001-00000009", "0001-00000010", "latest.json"]


def test_a_crash_at_any_moment_leaves_whole_weights(
    tmp_path: Path, make_tiny: Make, publish: Publish, fuse: Any
) -> None:
    """After the n-th file operation of a publication, for every n."""
    old, new, read = make_tiny(seed=1), make_tiny(seed=2), make_tiny(seed=3)
    for number in count(1):
        directory = tmp_path / str(number)
        for version in (1, 2):
            publish(old, directory, publication(version))
        survived = fuse.lives(number, lambda directory=directory: publish(new, directory, publication(3)))
        newest = WeightsDirectory(directory).newest()
        assert newest is not None
        load(read, directory, newest)
        assert same(read, new if newest.version == 3 else old)
        # A worker that has just read the previous latest.json still finds its version.
        load(read, directory, publication(2))
        publish(new, directory, publication(4))
        assert WeightsDirectory(directory).newest() == publication(4)
        assert not list(directory.glob(".*"))
        if survived:
            assert number > 4
            break


class TestReading:
    """A network file system serves a file for as long as it has a name."""

    @staticmethod
    def make(root: Path, version: int, content: bytes) -> Path:
        directory = root / publication(version).name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(content)
        return directory

    def test_what_is_read_outlives_the_publishers(self, tmp_path: Path) -> None:
        version = self.make(tmp_path, 2, b"weights")
        with WeightsDirectory(tmp_path).reading(publication(2), READER) as weights:
            shutil.rmtree(version)
            assert (weights / "model.safetensors").read_bytes() == b"weights"
        assert not list(tmp_path.iterdir()), "nothing is left that takes up room"

    def test_a_reader_that_was_killed_leaves_one_at_most(self, tmp_path: Path) -> None:
        old, new = self.make(tmp_path, 1, b"old"), self.make(tmp_path, 2, b"new")
        killed = WeightsDirectory(tmp_path).reading(publication(1), READER)
        killed.__enter__()
        with WeightsDirectory(tmp_path).reading(publication(2), READER) as weights:
            assert weights != new and (weights / "model.safetensors").read_bytes() == b"new"
        assert sorted(tmp_path.iterdir()) == [old, new]

    def test_one_that_is_gone(self, tmp_path: Path) -> None:
        with (
            pytest.raises(FileNotFoundError),
            WeightsDirectory(tmp_path).reading(publication(2), READER),
        ):
            raise AssertionError

    def test_without_links_the_files_themselves_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(link: Path, file: Path) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        version = self.make(tmp_path, 2, b"weights")
        with WeightsDirectory(tmp_path).reading(publication(2), READER) as weights:
            assert weights == version
        assert list(tmp_path.iterdir()) == [version]


def test_what_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS answers where latest.json was renamed away under the reader."""
    fields = {"run": "r", "epoch": 1, "version": 2, "next_index": 0, "max_waiting": 3}
    (tmp_path / "latest.json").write_text(json.dumps(fields))
    read, stale = Path.read_bytes, [OSError(errno.ESTALE, "Stale file handle")]

    def read_bytes(path: Path) -> bytes:
        if stale:
            raise stale.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    newest = WeightsDirectory(tmp_path).newest()
    assert newest is not None and newest.version == 2
