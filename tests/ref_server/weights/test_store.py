"""The store of weights on a real disk: visible versions are whole, wherever the server was killed."""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import structlog

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.records import DiskSpace
from ref_server.weights import room, store
from ref_server.weights.errors import IncompleteVersion, NoWeights, WeightsGone, WrongDigest, disk_failures
from ref_server.weights.store import WeightsStore
from shared.api import WeightsFile, WeightsName
from tests.fuse import fuse

__all__ = ["fuse"]

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}


def content(data: bytes) -> WeightsFile:
    return WeightsFile(bytes=len(data), sha256=sha256(data).hexdigest())


def contents(files: Mapping[str, bytes]) -> dict[str, WeightsFile]:
    return {file: content(data) for file, data in files.items()}


def version(number: int = 1, *, run: str = "run", lineage: str = "first", epoch: int = 0) -> WeightsName:
    return WeightsName(run, lineage, epoch, number)


def put(
    weights: WeightsStore, name: WeightsName, file: str, data: bytes, digest: str | None = None, token: str = ""
) -> bool:
    part = weights.begin(name, len(data), token)
    try:
        for start in range(0, len(data), 1000):
            part.write(data[start : start + 1000])
        return weights.keep(name, file, part, digest)
    finally:
        part.discard()


def publish(weights: WeightsStore, name: WeightsName, files: Mapping[str, bytes] = FILES, **words: Any) -> None:
    for file, data in files.items():
        put(weights, name, file, data)
    weights.commit(name, contents(files), words)


def whole(weights: WeightsStore, name: WeightsName) -> bool:
    """Whether a visible version has the bytes that its manifest says."""
    files = weights.get(name).files
    return all(content(weights.file(name, file)[0].read_bytes()) == expected for file, expected in files.items())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data" / "weights"


@pytest.fixture
def make(root: Path) -> Callable[..., WeightsStore]:
    def build(min_free: int | None = 0, unused_seconds: float = 1e9, **bounds: int) -> WeightsStore:
        return WeightsStore(root, min_free=min_free, unused_seconds=unused_seconds, **bounds)

    return build


@pytest.fixture
def weights(make: Callable[..., WeightsStore]) -> WeightsStore:
    return make()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has requested a part of a version does not count as reading it."""
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)


def test_nothing_is_written_before_the_first_upload(weights: WeightsStore, root: Path) -> None:
    weights.tidy([])
    assert weights.newest("run") is None
    assert weights.held() == (0, 0)
    assert not root.parent.exists()


def test_a_committed_version_is_a_directory_of_its_files(weights: WeightsStore, root: Path) -> None:
    put(weights, version(), "superfluous", b"not in the manifest")
    publish(weights, version())
    seen = {path.name: path.read_bytes() for path in (root / "run/first/0/1").iterdir() if path.name[0] != "."}
    assert seen == FILES
    assert not (root / ".staging" / "run").exists() or not list((root / ".staging").rglob("*.*"))


def test_words_of_a_committed_version_may_change(weights: WeightsStore) -> None:
    publish(weights, version(1), finished=False)
    publish(weights, version(1, lineage="other"), finished=False)
    weights.commit(version(1), contents(FILES), {"finished": True})
    assert weights.get(version(1)).words == {"finished": True}
    newest = weights.newest("run")
    assert newest is not None and newest.name.lineage == "other"  # it was committed later for the first time


def test_a_wrong_digest_leaves_no_file(weights: WeightsStore, root: Path) -> None:
    with pytest.raises(WrongDigest):
        put(weights, version(), "model.safetensors", b"a", content(b"b").sha256)
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert put(weights, version(), "model.safetensors", b"b", content(b"b").sha256)
    with pytest.raises(
        IncompleteVersion, match=r"model\.safetensors has 1 bytes, SHA-256 .*; the manifest says 1 bytes"
    ):
        weights.commit(version(), contents({"model.safetensors": b"c"}), {})


def test_the_newest_is_of_the_lineage_that_committed_last(weights: WeightsStore) -> None:
    def newest(lineage: str | None = None) -> WeightsName | None:
        newest_version = weights.newest("run", lineage)
        return newest_version and newest_version.name

    publish(weights, version(10))
    publish(weights, version(9))
    assert newest() == version(10)
    publish(weights, version(3, epoch=1))
    assert newest() == version(3, epoch=1)
    publish(weights, version(0, lineage="second"))
    assert newest() == version(0, lineage="second")
    assert newest("first") == version(3, epoch=1)
    assert newest("third") is None
    assert weights.newest("other run") is None


@pytest.mark.usefixtures("no_pause")
def test_two_versions_of_a_run_are_kept(weights: WeightsStore, root: Path) -> None:
    publish(weights, version(5, lineage="zero"))
    for number in range(1, 5):
        publish(weights, version(number))
        weights.tidy([])
    publish(weights, version(1, run="other"))
    weights.tidy([])
    assert weights.held()[0] == 3
    assert [whole(weights, version(number)) for number in (3, 4)] == [True, True]
    with pytest.raises(WeightsGone, match=r"0\.4 of run run"):
        weights.get(version(2))
    with pytest.raises(NoWeights):
        weights.get(version(9))
    assert {path.name for path in (root / "run").iterdir()} == {"first"}  # nothing empty is left


def test_what_is_read_stays(weights: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(weights, version(1))
    with weights.readers.reading(version(1)):
        monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)
        for number in (2, 3):
            publish(weights, version(number))
        weights.tidy([])
        assert whole(weights, version(1))
        monkeypatch.setattr(store, "PAUSE_SECONDS", 60.0)
    weights.tidy([])
    assert whole(weights, version(1))  # the reader may come again for its next file
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)
    weights.tidy([])
    with pytest.raises(WeightsGone):
        weights.get(version(1))


def test_an_older_version_stays_until_it_can_be_used(weights: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes back to an earlier checkpoint uploads its reference again, and then makes it the server's."""
    for number in (5, 6, 1):
        publish(weights, version(number))
    weights.tidy([])
    assert weights.held()[0] == 3
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)
    weights.tidy([])
    with pytest.raises(WeightsGone):
        weights.get(version(1))


@pytest.mark.usefixtures("no_pause")
def test_a_run_that_is_over_goes(make: Callable[..., WeightsStore], root: Path) -> None:
    weights = make(unused_seconds=60)
    publish(weights, version(1))
    publish(weights, version(1, run="pinned"))
    weights.tidy([])
    assert weights.held()[0] == 2
    for manifest in root.glob("*/*/*/*/.manifest.json"):
        os.utime(manifest, (0, 0))
    weights.tidy([version(1, run="pinned")])
    assert weights.held()[0] == 1
    assert not (root / "run").exists()


def test_abandoned_uploads_are_removed(
    make: Callable[..., WeightsStore], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make()
    put(weights, version(), "model.safetensors", b"a")
    part = weights.begin(version(2), 1)
    part.write(b"b")
    weights.tidy([])
    assert weights.keep(version(2), "model.safetensors", part, None)
    monkeypatch.setattr(store, "STALE_SECONDS", -1.0)
    weights.tidy([])
    assert not list(root.rglob("*.*"))
    part.discard()


def test_what_a_killed_process_left_goes_at_once(make: Callable[..., WeightsStore], root: Path) -> None:
    """A part that no process holds open has no writer."""
    weights = make()
    put(weights, version(), "model.safetensors", b"a")
    (left,) = root.rglob("parts")
    (left / "of a dead process").write_bytes(b"half")
    alive = weights.begin(version(), 1)
    make().tidy([])
    assert [path.name for path in left.iterdir()] == [alive.path.name]
    assert not put(weights, version(), "model.safetensors", b"a")
    alive.discard()


def test_a_kill_at_any_moment_leaves_whole_versions(
    make: Callable[..., WeightsStore], fuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)
    for number in range(1, 4):
        publish(make(), version(number), step=number)
    operations, survived = 0, False
    while not survived:
        operations += 1
        newer = version(3 + operations)

        def work(newer: WeightsName = newer) -> None:
            publish(make(), newer, step=newer.version)
            make().tidy([])

        survived = fuse.lives(operations, work)
        again = make()
        again.tidy([])
        newest_version = again.newest("run")
        assert newest_version is not None and newest_version.words == {"step": newest_version.name.version}
        assert newest_version.name.version >= (newer.version if survived else 3)
        assert whole(again, newest_version.name)
        publish(again, newer, step=newer.version)  # its client repeats what was not answered
        assert whole(again, newer)
    assert operations > 10


def test_a_full_disk_refuses_before_and_while_a_file_comes(
    make: Callable[..., WeightsStore], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make(), version(1))
    weights = make(min_free=2**62)
    with pytest.raises(StorageFull, match="min_free_mib"):
        weights.begin(version(2), 0)
    part = make().begin(version(2), 0)
    part.write(b"a")
    monkeypatch.setattr(room, "disk_space", lambda *_: DiskSpace(free=9, floor=8))
    with pytest.raises(StorageFull):
        part.write(b"bb")
    part.discard()
    assert not list(root.rglob("parts/*"))
    assert whole(weights, version(1))


def test_a_token_fills_no_more_than_three_times_what_is_free(make: Callable[..., WeightsStore]) -> None:
    """Whatever it calls its versions, and whether it commits them; a restarted server knows it, too."""
    chunk, stored = bytes(2**20), 0
    with pytest.raises(StorageFull, match="max_weights_mib_per_token is 3 times what is free"):
        for number in range(20):
            put(make(most=20 * 2**20), version(number, run=f"run-{number}"), "model", chunk, token="one")
            stored += 1
    assert stored == 14  # three quarters, and some blocks for each file
    weights = make(most=20 * 2**20)
    assert put(weights, version(), "model", chunk, token="two")
    assert put(weights, version(2), "model", chunk)  # who has no token is bounded only by the sum
    part = weights.begin(version(3), 0, "three")  # its length is not known
    part.write(chunk)
    with pytest.raises(StorageFull, match="per_token"):
        for _ in range(3):
            part.write(chunk)
    part.discard()


def test_all_weights_are_bounded_and_what_is_published_counts(make: Callable[..., WeightsStore]) -> None:
    weights = make(most=3 * 2**20, most_of_token=2 * 2**20)
    data = {"model": bytes(2**20)}
    put(weights, version(1), "model", data["model"], token="one")
    weights.commit(version(1), contents(data), {"step": 1})
    weights.commit(version(1), contents(data), {"step": 2})
    again = make(most=3 * 2**20, most_of_token=2 * 2**20)
    with pytest.raises(StorageFull, match=r"max_weights_mib_per_token is 2\.0 MiB"):
        again.begin(version(2), 2**20, "one")
    put(again, version(2), "model", data["model"], token="two")
    with pytest.raises(StorageFull, match=r"max_weights_mib is 3\.0 MiB"):
        again.begin(version(3), 2**20)


def test_a_version_counts_for_the_token_that_uploaded_to_it_last(make: Callable[..., WeightsStore]) -> None:
    weights = make(most_of_token=2 * 2**20)
    put(weights, version(1), "a", bytes(2**20), token="one")
    put(weights, version(1), "b", b"b", token="two")
    with pytest.raises(StorageFull):
        make(most_of_token=2 * 2**20).begin(version(2), 2**20, "two")
    make(most_of_token=2 * 2**20).begin(version(3), 2**20, "one").discard()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
def test_a_disk_that_others_filled_is_full() -> None:
    with pytest.raises(StorageFull, match="No space left"), disk_failures():
        Path("/dev/full").write_bytes(b"a")
    with pytest.raises(StorageBroken, match="/none"), disk_failures():
        Path("/none").read_bytes()


def _manifest(**changes: Any) -> Callable[[Path], object]:
    """Replaces keys of a version's manifest."""

    def damage(directory: Path) -> None:
        file = directory / ".manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / ".manifest.json").write_bytes(content)


def _replaced(file: str, by: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda directory: ((directory / file).unlink(), by(directory / file))


DAMAGE = {
    "not text": _bytes(b"\xff\x00"),
    "cut off": _bytes(b'{"number": 2, "fi'),
    "deeper than the stack": _bytes(b"[" * 100_000),
    "huge": lambda directory: os.truncate(directory / ".manifest.json", 2**40),
    "files": _manifest(files=["config.json"]),
    "a file elsewhere": _manifest(files={"../1/config.json": {"bytes": 2, "sha256": "0" * 64}}),
    "a directory": _replaced(".manifest.json", Path.mkdir),
    "a loop": _replaced(".manifest.json", lambda path: path.symlink_to(path)),
    "a pipe": _replaced(".manifest.json", os.mkfifo),
    "a file is gone": _replaced("model.safetensors", lambda path: None),
    "a file is short": _replaced("model.safetensors", lambda path: path.write_bytes(b"a")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_version_counts_as_never_committed(
    make: Callable[..., WeightsStore], root: Path, damage: Callable[[Path], object]
) -> None:
    publish(make(), version(1), step=1)
    publish(make(), version(2), step=2)
    damage(root / "run/first/0/2")
    weights = make()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            newest = weights.newest("run")
            assert newest is not None and newest.name == version(1)
            assert weights.held()[0] == 1
            with pytest.raises(NoWeights):
                weights.get(version(2))
            weights.tidy([])
    assert [entry["directory"] for entry in logs] == [str(root / "run/first/0/2")]
    publish(weights, version(3), step=3)
    publish(weights, version(2), step=2)
    assert whole(weights, version(2)) and whole(weights, version(3))


def test_a_damaged_upload_is_uploaded_again(weights: WeightsStore, root: Path) -> None:
    put(weights, version(), "model.safetensors", b"a")
    (digest,) = root.rglob("digests/*")
    digest.write_bytes(b"{")
    assert put(weights, version(), "model.safetensors", b"a")
    weights.commit(version(), contents({"model.safetensors": b"a"}), {})
    assert whole(weights, version())


def test_a_directory_that_cannot_be_tidied_keeps_no_other_from_it(
    make: Callable[..., WeightsStore], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)
    for run in ("a", "b"):
        for number in (1, 2, 3):
            publish(make(), version(number, run=run))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == root / "a/first/0/1":
            raise PermissionError("not yours")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageBroken, match="not yours"):
        make().tidy([])
    assert sorted(path.parent.name for path in root.glob("b/*/*/*/.manifest.json")) == ["2", "3"]


def test_what_another_server_has_committed_meanwhile_stays(
    make: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was not answered in time asks the other server of a shared directory."""
    slow, fast, name = make(), make(), version()
    for file, data in FILES.items():
        put(slow, name, file, data)
    write_text = store.write_text
    others = iter([fast])

    def write_slowly(file: Path, text: str) -> None:
        write_text(file, text)
        for other in others:
            other.commit(name, contents(FILES), {})

    monkeypatch.setattr(store, "write_text", write_slowly)
    with pytest.raises(StorageBroken):
        slow.commit(name, contents(FILES), {})
    assert whole(fast, name)
