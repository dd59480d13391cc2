"""Tensors from `torch.save` blobs: every dtype and layout that clients send, and hostile ones."""

import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ref_server.legacy.tensors import FLOATS, INTEGERS, MalformedUpload, read_tensor, write_tensor
from tests.ref_server.legacy.blobs import archive, entries_of, pickle_of
from tests.ref_server.legacy.simple_grpo import bytes_to_tensor, tensor_to_bytes

MATRIX = torch.arange(6).reshape(2, 3)
ALL = {**INTEGERS, **FLOATS}


def refused(blob: bytes, dtypes: Mapping[str, torch.dtype] = INTEGERS) -> str:
    """The reason."""
    with pytest.raises(MalformedUpload) as error:
        read_tensor("part", blob, dtypes)
    assert str(error.value).startswith("part: ")
    return str(error.value)


@pytest.mark.parametrize("dtype", ALL.values(), ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[:, 1:],
        lambda t: t[::2, ::3],
        lambda t: t[0],
        lambda t: t[3, 4],
        lambda t: t[None, None, None, None, 1:2],
        lambda t: t.clone().requires_grad_(t.is_floating_point()),
    ],
    ids=["whole", "transposed", "columns", "steps", "row", "scalar", "deep", "grad"],
)
def test_saved_tensors_are_read(dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    saved = view(torch.arange(35).reshape(5, 7).to(dtype))
    read = read_tensor("part", tensor_to_bytes(saved), ALL)
    assert (read.dtype, read.device.type, read.requires_grad) == (dtype, "cpu", False)
    assert torch.equal(read, saved.detach())
    assert read.is_contiguous()
    assert read.untyped_storage().nbytes() == read.nbytes


def test_a_view_is_written_without_its_storage() -> None:
    whole = torch.zeros(100_000)
    blob = write_tensor(whole[:2].requires_grad_())
    assert len(blob) < 2000
    assert torch.equal(bytes_to_tensor(blob), whole[:2])
    assert not bytes_to_tensor(blob).requires_grad


def test_large_sizes_and_a_gpu_s_name(tmp_path: Path) -> None:
    saved = torch.arange(70_000)
    assert torch.equal(read_tensor("part", tensor_to_bytes(saved), INTEGERS), saved)
    torch.save(MATRIX, tmp_path / "named.pt")  # the archive's folder is then `named`
    assert torch.equal(read_tensor("part", (tmp_path / "named.pt").read_bytes(), INTEGERS), MATRIX)
    program = pickle_of((2, 3), (3, 1), elements=6).replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:7")
    blob = archive(entries_of(program, MATRIX.numpy().tobytes()))
    assert torch.equal(read_tensor("part", blob, INTEGERS), MATRIX)


def test_archives_of_other_versions_of_pytorch() -> None:
    program, storage = pickle_of((2, 3), (3, 1), elements=6, key="94384832"), MATRIX.numpy().tobytes()
    oldest = {"archive/data.pkl": program, "archive/data/94384832": storage, "archive/version": b"3\n"}
    assert torch.equal(read_tensor("part", archive(oldest), INTEGERS), MATRIX)
    later = entries_of(pickle_of((2, 3), (3, 1), elements=6), storage)
    later |= {"archive/byteorder": b"little", "archive/.data/serialization_id": b"1" * 40, "archive/.of_2030": b"?"}
    assert torch.equal(read_tensor("part", archive(later), INTEGERS), MATRIX)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: MATRIX.float(), "must have dtype int64, got a FloatStorage"),
        (lambda: MATRIX.to(torch.complex64), "ComplexFloatStorage"),
        (lambda: torch.zeros(0, dtype=torch.int64), "not empty"),
        (lambda: torch.ones(3, dtype=torch.int64).expand(4, 3), "do not lie within a storage of 3 elements"),
        (lambda: MATRIX.to_sparse(), "one plain, dense tensor"),
        (lambda: torch.quantize_per_tensor(MATRIX.float(), 0.1, 0, torch.qint8), "one plain, dense tensor"),
        (lambda: torch.nested.nested_tensor([MATRIX[0], MATRIX[1, :2]]), "one plain, dense tensor"),
        (lambda: torch.zeros(3, device="meta"), "one plain, dense tensor"),
        (lambda: torch.tensor([1j]).conj().imag, "one plain, dense tensor"),  # its negative bit is set
        (lambda: [MATRIX], "one plain, dense tensor"),
        (lambda: 2**100, "one plain, dense tensor"),
        (lambda: MATRIX.untyped_storage(), "one plain, dense tensor"),
        (lambda: [[]] * 2000, "data.pkl is missing, or larger"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # some of these are deprecated, or prototypes
def test_objects_other_than_one_plain_tensor(make: Callable[[], Any], reason: str) -> None:
    buffer = io.BytesIO()
    torch.save(make(), buffer)
    assert reason in refused(buffer.getvalue())


STORAGE = MATRIX.numpy().tobytes()
GOOD = entries_of(pickle_of((2, 3), (3, 1), elements=6), STORAGE)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (pickle_of((2**40,), (1,), elements=2**40), "one plain, dense tensor"),
        (pickle_of((2**30,), (1,), elements=2**30), "claims 1073741824 elements and has 48 bytes"),
        (pickle_of((2**30,), (0,), elements=6), "do not lie within"),
        (pickle_of((2**16,) * 8, (0,) * 8, elements=6), "do not lie within"),
        (pickle_of((2, 3), (3, 1), elements=6, offset=1), "do not lie within"),
        (pickle_of((2, 3), (3, 2), elements=6), "do not lie within"),
        (pickle_of((2, 3), (-3, 1), elements=6, offset=5), "not empty"),
        (pickle_of((-2, 3), (3, 1), elements=6), "not empty"),
        (pickle_of((2, 3), (3, 1), elements=6, offset=-1), "not empty"),
        (pickle_of((0, 2**31 - 1), (3, 1), elements=6), "not empty"),
        (pickle_of((2, 3), (3, 1), elements=-6), "do not lie within"),
        (pickle_of((2, 2), (3, 1), elements=5), "claims 5 elements and has 48 bytes"),
        (pickle_of((2, 3), (3, 1), elements=6, key="1"), "data/1 is missing"),
        (pickle_of((2, 3), (3, 1), elements=6, key="0", key_length=200), "one plain, dense tensor"),
        (pickle_of((2, 3), (3, 1), elements=6, storage="ShortStorage"), "must have dtype int64"),
        (pickle_of((1,) * 17, (1,) * 17, elements=6), "one plain, dense tensor"),
        (GOOD["archive/data.pkl"].replace(b"\x89c", b"\x88c"), "claim a gradient"),
        (b"", "one plain, dense tensor"),
        (GOOD["archive/data.pkl"] + b".", "one plain, dense tensor"),
        (GOOD["archive/data.pkl"].replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor"), "one plain, dense tensor"),
        (b"\x80\x02" + b"(" * 900 + b".", "one plain, dense tensor"),
        (b"\x80\x02]" + b"2" * 900 + b".", "one plain, dense tensor"),
    ],
)
def test_hostile_programs(program: bytes, reason: str) -> None:
    assert reason in refused(archive(GOOD | {"archive/data.pkl": program}))


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    class Command:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    for program in (pickle.dumps(Command(), 2), b"cposix\nsystem\n(X\x04\0\0\0truetR."):
        assert "one plain, dense tensor" in refused(archive(GOOD | {"archive/data.pkl": program}))
    assert "zip archive" in refused(pickle.dumps(Command(), 2))
    assert not any(tmp_path.iterdir())


def test_a_compressed_archive_is_refused_before_it_is_expanded() -> None:
    bomb = archive(GOOD | {"archive/data/0": bytes(200 * 2**20)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 2**20
    tracemalloc.start()
    assert "stored, not compressed" in refused(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_directory_of_many_entries_is_refused_before_it_is_parsed() -> None:
    blob = archive({f"archive/{number:05}": b"" for number in range(60_000)} | GOOD)
    tracemalloc.start()
    assert "directory claims" in refused(blob)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"archive/data/0": STORAGE, "archive/version": b"3\n"}, "one data.pkl"),
        ({**GOOD, "other/data.pkl": b""}, "one data.pkl"),
        ({"data.pkl": GOOD["archive/data.pkl"], "data/0": STORAGE}, "one data.pkl"),
        ({**GOOD, "archive/byteorder": b"big"}, "byteorder must be little"),
        ({**GOOD, "archive/byteorder": b"x" * 4096}, "byteorder is missing, or larger"),
        ({**GOOD, "archive/data.pkl": b"\x80\x02" + b"N" * 4096 + b"."}, "data.pkl is missing, or larger"),
        ({**GOOD, "archive/data/0": STORAGE[:-1]}, "claims 6 elements and has 47 bytes"),
        ({**GOOD, **{f"archive/{number}": b"" for number in range(16)}}, "more entries"),
        ({}, "one data.pkl"),
    ],
)
def test_archives_of_the_wrong_entries(entries: dict[str, bytes], reason: str) -> None:
    assert reason in refused(archive(entries))


def test_an_archive_in_an_archive_is_a_storage_like_any_other() -> None:
    inner = archive(GOOD).ljust(1024, b"\0")
    blob = archive(entries_of(pickle_of((128,), (1,), elements=128), inner))
    assert read_tensor("part", blob, INTEGERS).numpy().tobytes() == inner


def test_a_duplicate_entry() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in [*GOOD.items(), ("archive/data/1", STORAGE)]:
            file.writestr(name, data)
    assert "twice" in refused(buffer.getvalue().replace(b"archive/data/1", b"archive/data/0"))


def test_an_entry_with_a_false_size() -> None:
    blob = archive(GOOD)
    size = len(STORAGE).to_bytes(4, "little") * 2  # compressed, then not
    assert blob.count(size) == 2
    claimed = blob.replace(size, (2**31).to_bytes(4, "little") * 2)
    assert "more bytes than there are" in refused(claimed)
    # As large as the whole blob, so that only reading it can tell.
    for length in (len(STORAGE) + 8, len(blob) // 2):
        assert refused(blob.replace(size, length.to_bytes(4, "little") * 2))


def test_an_encrypted_entry() -> None:
    blob = bytearray(archive(GOOD))
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = -1
        while (at := blob.find(signature, at + 1)) >= 0:
            blob[at + flags] |= 1
    assert "encrypted" in refused(bytes(blob))


def test_bytes_behind_an_archive() -> None:
    blob = archive(GOOD)
    assert "nothing behind it" in refused(blob + b"\0")
    assert "nothing behind it" in refused(blob[:-2] + b"\1\0c")
    assert "nothing behind it" in refused(blob + blob[-22:-2] + b"\1\0c")


@pytest.mark.parametrize("blob", [tensor_to_bytes(MATRIX), archive(GOOD)], ids=["torch", "zip"])
def test_a_blob_cut_anywhere_is_refused(blob: bytes) -> None:
    for length in range(len(blob)):
        refused(blob[:length])


def test_a_blob_with_any_byte_changed_is_read_or_refused() -> None:
    blob = tensor_to_bytes(MATRIX)
    for place in range(len(blob)):
        for value in (0, 255, blob[place] ^ 1):
            changed = blob[:place] + bytes([value]) + blob[place + 1 :]
            try:
                read = read_tensor("part", changed, ALL)
            except MalformedUpload:
                continue
            assert read.numel() <= 6
