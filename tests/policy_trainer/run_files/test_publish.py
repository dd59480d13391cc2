"""Published weights: the file that latest.json names is always there and complete."""

import errno
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.run_files.publish import KEPT, Publication, latest, publish, second_name
from policy_trainer.sampling.hf import load_weights

Make = Callable[..., PreTrainedModel]


def publication(version: int, *, epoch: int = 0, finished: bool = False) -> Publication:
    return Publication("test", epoch, version, next_index=version * 10, max_waiting=12, finished=finished)


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    other_state = other.state_dict()
    return all(torch.equal(tensor, other_state[name]) for name, tensor in one.state_dict().items())


class TestRoundTrip:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights(self, tmp_path: Path, make_tiny: Make, tied: bool, dtype: torch.dtype) -> None:
        model, other = make_tiny(seed=1, tied=tied), make_tiny(seed=2, tied=tied)
        for either in (model, other):
            torch.nn.Module.to(either, dtype)
        publish(model, tmp_path, publication(3))
        assert not same(model, other)
        load_weights(other, tmp_path / publication(3).file)
        assert same(model, other)
        head, embedding = other.get_output_embeddings(), other.get_input_embeddings()
        assert (head.weight is embedding.weight) is tied  # type: ignore[union-attr]

    def test_pointer(self, tmp_path: Path, make_tiny: Make) -> None:
        publish(make_tiny(), tmp_path, publication(3, epoch=2, finished=True))
        assert latest(tmp_path) == Publication("test", 2, 3, next_index=30, max_waiting=12, finished=True)

    def test_before_the_first(self, tmp_path: Path) -> None:
        assert latest(tmp_path) is None
        assert latest(tmp_path / "not there") is None

    def test_of_another_architecture_does_not_fit(self, tmp_path: Path, make_tiny: Make) -> None:
        publish(make_tiny(vocabulary=64), tmp_path, publication(0))
        with pytest.raises(RuntimeError):
            load_weights(make_tiny(vocabulary=65), tmp_path / publication(0).file)


def test_only_the_newest_are_kept(tmp_path: Path, make_tiny: Make) -> None:
    model = make_tiny()
    for version in (8, 9, 10, 11):
        publish(model, tmp_path, publication(version))
    assert KEPT == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000-00000010.safetensors",
        "0000-00000011.safetensors",
        "latest.json",
    ]


def test_a_new_epoch_is_newer_whatever_its_version(tmp_path: Path, make_tiny: Make) -> None:
    model = make_tiny()
    for epoch, version in ((0, 40), (0, 44), (1, 20), (1, 24)):
        publish(model, tmp_path, publication(version, epoch=epoch))
        newest = latest(tmp_path)
        assert newest is not None and newest.version == version
        assert (tmp_path / newest.file).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) == KEPT


def test_a_crash_at_any_moment_leaves_whole_weights(tmp_path: Path, make_tiny: Make, fuse: Any) -> None:
    """After the n-th file operation of a publication, for every n."""
    old, new, read = make_tiny(seed=1), make_tiny(seed=2), make_tiny(seed=3)
    for number in count(1):
        directory = tmp_path / str(number)
        for version in (1, 2):
            publish(old, directory, publication(version))
        survived = fuse.lives(number, lambda directory=directory: publish(new, directory, publication(3)))
        newest = latest(directory)
        assert newest is not None
        load_weights(read, directory / newest.file)
        assert same(read, new if newest.version == 3 else old)
        # A worker that has just read the previous latest.json still finds its file.
        assert (directory / publication(2).file).exists()
        publish(new, directory, publication(4))
        assert latest(directory) == publication(4)
        if survived:
            assert number > 4
            break


class TestSecondName:
    """A network file system serves a file for as long as it has a name."""

    def test_it_outlives_the_publishers(self, tmp_path: Path) -> None:
        weights = tmp_path / "0001-00000002.safetensors"
        weights.write_bytes(b"weights")
        with second_name(weights, "0-of-1") as name:
            weights.unlink()
            assert name.read_bytes() == b"weights"
        assert not list(tmp_path.iterdir()), "nothing is left that takes up room"

    def test_a_reader_that_was_killed_leaves_one_at_most(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
        old.write_bytes(b"old")
        new.write_bytes(b"new")
        killed = second_name(old, "0-of-1")
        killed.__enter__()
        with second_name(new, "0-of-1") as name:
            assert name.read_bytes() == b"new"
        assert sorted(tmp_path.iterdir()) == [new, old]

    def test_without_links_the_file_itself_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(link: Path, file: Path) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        weights = tmp_path / "0001-00000002.safetensors"
        with second_name(weights, "0-of-1") as name:
            assert name == weights


def test_what_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS answers where latest.json was renamed away under the reader."""
    fields = {"run": "r", "epoch": 1, "version": 2, "next_index": 0, "max_waiting": 3}
    (tmp_path / "latest.json").write_text(json.dumps(fields))
    read, stale = Path.read_text, [OSError(errno.ESTALE, "Stale file handle")]

    def read_text(path: Path) -> str:
        if stale:
            raise stale.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    found = latest(tmp_path)
    assert found is not None and found.version == 2
