"""Reads the frames and the `torch.save` blobs of the Simple-GRPO byte protocol without trusting them.

A frame is `u32 big-endian count`, then `count` times `u32 length, bytes`.

A blob is a zip archive of a small pickle program and the storage's bytes. A program that `weights_only` accepts can
still allocate without bound, and two zip readers can read one file differently. So the archive's directory is bounded
before it is parsed; the program must be, opcode by opcode, the one that `torch.save` writes for one tensor; and PyTorch
loads a new archive, written from the checked parts only.
"""

import io
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO

import torch
from torch import Tensor

MAX_PARTS = 5
_U32_BYTES = 4


class MalformedUpload(ValueError):
    """The upload is not one of the byte protocol; the message says why."""


def split_frame(body: bytes) -> list[memoryview]:
    """The parts of a frame, as views into it: nothing is copied, whatever lengths it claims. Raises MalformedUpload."""
    count = _u32(body, 0)
    if count > MAX_PARTS:
        raise MalformedUpload(f"the frame claims {count} parts; at most {MAX_PARTS} are taken")
    parts, start = [], _U32_BYTES
    for number in range(count):
        length = _u32(body, start)
        start += _U32_BYTES
        if length > len(body) - start:
            raise MalformedUpload(f"part {number} claims {length} bytes; {len(body) - start} are left")
        parts.append(memoryview(body)[start : start + length])
        start += length
    if start != len(body):
        raise MalformedUpload(f"{len(body) - start} bytes follow the last of {count} parts")
    return parts


def join_frame(parts: Sequence[bytes]) -> bytes:
    """The inverse of `split_frame`."""
    assert len(parts) <= MAX_PARTS
    return b"".join([_to_u32(len(parts)), *(piece for part in parts for piece in (_to_u32(len(part)), part))])


def _u32(body: bytes, start: int) -> int:
    if len(body) - start < _U32_BYTES:
        raise MalformedUpload(f"the frame ends at byte {len(body)}, where a count or a length should be")
    return int.from_bytes(body[start : start + _U32_BYTES], "big")


def _to_u32(number: int) -> bytes:
    return number.to_bytes(_U32_BYTES, "big")


FLOATS: Mapping[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
INTEGERS: Mapping[str, torch.dtype] = {"LongStorage": torch.int64}

# torch.save writes up to seven entries, in less than 700 bytes.
_MAX_DIRECTORY_BYTES = 4096
_MAX_ENTRIES = 16
# Each entry but the storage.
_MAX_SMALL_BYTES = 1024
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES = b"PK\x06\x07", 20
_END64, _END64_BYTES = b"PK\x06\x06", 56
# What zipfile raises for a damaged archive.
_BAD_ARCHIVE = (
    zipfile.BadZipFile, ValueError, ArithmeticError, LookupError, RuntimeError, EOFError, OSError, struct.error,
)  # fmt: skip

_INT = rb"(?:K.|M..|J....)"
_TUPLE = rb"(?:\)|" + _INT + rb"\x85q.|" + _INT + _INT + rb"\x86q.|" + _INT * 3 + rb"\x87q.|\(" + _INT + rb"{4,16}tq.)"
# _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict()), as pickled by protocol 2.
_PROGRAM = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq.\("
    rb"\(X\x07\0\0\0storageq.ctorch\n(?P<storage>[A-Za-z0-9]{1,32})\nq."
    rb"X(?P<key_bytes>.)\0\0\0(?P<key>[0-9]{1,20})q."
    rb"X(?P<device_bytes>.)\0\0\0(?P<device>[a-z]{1,16}(?::[0-9]{1,3})?)q.(?P<elements>" + _INT + rb")tq.Q"
    rb"(?P<offset>" + _INT + rb")(?P<size>" + _TUPLE + rb")(?P<stride>" + _TUPLE + rb")"
    rb"(?P<gradient>[\x88\x89])ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\.",
    re.DOTALL,
)
_INT_OPCODE = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)


@dataclass(frozen=True)
class _Program:
    """The tensor that the pickle program makes: a view into a storage of `elements` elements."""

    storage: str
    key: str
    elements: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_tensor(name: str, blob: bytes | memoryview, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """One tensor of one of the dtypes, on the CPU, contiguous, with its own storage. Raises MalformedUpload.

    name: of the part, for the error.
    """
    try:
        archive = _checked(blob, dtypes)
    except MalformedUpload as error:
        raise MalformedUpload(f"{name}: {error}") from None
    tensor = torch.load(archive, map_location="cpu", weights_only=True)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def write_tensor(tensor: Tensor) -> bytes:
    """The blob that the protocol's clients read with `torch.load`; it holds this tensor's elements only."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
    return buffer.getvalue()


def _checked(blob: bytes | memoryview, dtypes: Mapping[str, torch.dtype]) -> IO[bytes]:
    """A new archive of the blob's checked parts."""
    _check_directory_size(blob)
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            return _write_archive(*_read_parts(_Entries(archive, len(blob)), dtypes))
    except MalformedUpload:
        raise
    except _BAD_ARCHIVE as error:
        raise MalformedUpload(f"must be what torch.save writes; the archive cannot be read: {error}") from None


def _read_parts(entries: "_Entries", dtypes: Mapping[str, torch.dtype]) -> tuple[bytes, str, bytes]:
    """The checked program, the storage's key in it, and the storage's bytes."""
    if entries.read("byteorder", default=b"little") != b"little":
        raise MalformedUpload("byteorder must be little")
    pickled = entries.read("data.pkl")
    program = _parse(pickled, dtypes)
    storage = entries.read(f"data/{program.key}", most=None)
    if program.elements * dtypes[program.storage].itemsize != len(storage):
        raise MalformedUpload(f"its storage claims {program.elements} elements and has {len(storage)} bytes")
    return pickled, program.key, storage


def _check_directory_size(blob: bytes | memoryview) -> None:
    """Raises unless the archive's directory is small: parsing one costs a thousand times its size."""
    end = bytes(blob[-_END_BYTES:])
    if len(end) < _END_BYTES or not end.startswith(_END) or end[-2:] != b"\0\0":
        raise MalformedUpload("must be what torch.save writes since PyTorch 1.6: a zip archive, with nothing behind it")
    size = int.from_bytes(end[12:16], "little")
    before = bytes(blob[-_END_BYTES - _LOCATOR_BYTES - _END64_BYTES : -_END_BYTES])
    if before[-_LOCATOR_BYTES:].startswith(_LOCATOR) and before.startswith(_END64):
        size = int.from_bytes(before[40:48], "little")
    if size > _MAX_DIRECTORY_BYTES:
        raise MalformedUpload(f"the archive's directory claims {size} bytes; one tensor's is far smaller")


class _Entries:
    """An archive's entries: few, stored, unique, no larger than the blob. Raises MalformedUpload for others."""

    def __init__(self, archive: zipfile.ZipFile, blob_bytes: int) -> None:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        if len(entries) > _MAX_ENTRIES or len(names) < len(entries):
            raise MalformedUpload("the archive has more entries than one tensor has, or one of them twice")
        if any(entry.compress_type or entry.compress_size != entry.file_size for entry in entries):
            raise MalformedUpload("the archive's entries must be stored, not compressed")
        if sum(entry.file_size for entry in entries) > blob_bytes:
            raise MalformedUpload("the archive's entries claim more bytes than there are")
        roots = [name.removesuffix("data.pkl") for name in names if re.fullmatch("[^/]+/data.pkl", name)]
        if len(roots) != 1:
            raise MalformedUpload("the archive must have one data.pkl")
        [self._root] = roots
        self._sizes = {entry.filename: entry.file_size for entry in entries}
        self._archive = archive

    def read(self, name: str, *, most: int | None = _MAX_SMALL_BYTES, default: bytes | None = None) -> bytes:
        """An entry's bytes, at most `most`, with their checksum verified."""
        size = self._sizes.get(self._root + name)
        if size is None and default is not None:
            return default
        if size is None or (most is not None and size > most):
            raise MalformedUpload(f"{name} is missing, or larger than one tensor's")
        data = self._archive.read(self._root + name)
        if len(data) != size:
            raise MalformedUpload(f"{name} is cut off")
        return data


def _parse(pickled: bytes, dtypes: Mapping[str, torch.dtype]) -> _Program:
    """The tensor that the program makes, checked to lie within its storage."""
    match = _PROGRAM.fullmatch(pickled)
    if match is None or any(match[f"{text}_bytes"][0] != len(match[text]) for text in ("key", "device")):
        raise MalformedUpload("its pickle is not what torch.save writes for one plain, dense tensor")
    storage = match["storage"].decode()
    if storage not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes.values())
        raise MalformedUpload(f"must have dtype {allowed}, got a {storage}")
    if storage in INTEGERS and match["gradient"] == b"\x88":
        raise MalformedUpload("its integers claim a gradient, which PyTorch does not load")
    [elements], [offset], size, stride = (_numbers(match[part]) for part in ("elements", "offset", "size", "stride"))
    if len(size) != len(stride) or min(offset, *stride, 0) < 0 or min(size, default=1) < 1:
        raise MalformedUpload(f"must be a tensor that is not empty, got size {size} and stride {stride}")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    # An expanded tensor has more elements than its storage, and copying it would allocate them all.
    if prod(size) > elements or last >= elements:
        raise MalformedUpload(f"size {size} and stride {stride} do not lie within a storage of {elements} elements")
    return _Program(storage, match["key"].decode(), elements, offset, size, stride)


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    """The integers that a matched piece of the program pushes."""
    return tuple(
        int.from_bytes(b"".join(groups), "little", signed=groups[2] != b"") for groups in _INT_OPCODE.findall(opcodes)
    )


def _write_archive(pickled: bytes, key: str, storage: bytes) -> IO[bytes]:
    """The smallest archive that PyTorch loads, of the checked parts."""
    buffer = io.BytesIO()
    entries = {"data.pkl": pickled, "byteorder": b"little", f"data/{key}": storage, "version": b"3\n"}
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    buffer.seek(0)
    return buffer
