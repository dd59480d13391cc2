"""Changes to files of `torch.save`: to the zip archive, to its pickle program, and to its storages."""

import io
import random
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fuzz.mutations import change_bytes, integer

Entries = list[tuple[str, bytes]]


def saved(thing: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer, **options)
    return buffer.getvalue()


def _change_entries(blob: bytes, chance: random.Random) -> bytes:
    """Duplicates, deletes, renames, truncates or extends entries of the archive, or exchanges their content."""
    entries = _entries(blob)
    place, other = (chance.randrange(len(entries)) for _ in range(2))
    name, data = entries[place]
    match chance.randrange(7):
        case 0:
            entries.insert(other, entries[place])
        case 1:
            del entries[place]
        case 2:
            entries[place] = entries[other][0], data
        case 3:
            entries[place] = name, data[: chance.randrange(len(data) + 1)]
        case 4:
            entries[place] = name, data + bytes(chance.choice((1, 8, 4096)))
        case 5:
            entries[place] = chance.choice(("data.pkl", "x/data.pkl", "é/data.pkl", "../data.pkl", "", name * 99)), data
        case _:
            entries += [(f"{name}{i}", b"") for i in range(chance.choice((1, 20, 300)))]
    return _archive(entries, chance.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,)))


def _change_program(blob: bytes, chance: random.Random) -> bytes:
    """Changes integers, names or opcodes of the pickle program; its checksum stays valid."""
    entries = _entries(blob)
    place = next((i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl")), 0)
    name, program = entries[place]
    changed = bytearray(program)
    at = chance.randrange(len(changed) + 1)
    match chance.randrange(6):
        case 0 | 1:
            changed = bytearray(_change_integer(program, chance))
        case 2:
            changed = bytearray(program.replace(*chance.choice(_RENAMED)))
        case 3:
            changed[at:at] = chance.choice(_OPCODES)
        case 4:
            del changed[at : at + chance.choice((1, 1, 4, 20))]
        case _:
            changed = bytearray(change_bytes(program, [program], chance))
    entries[place] = name, bytes(changed)
    return _archive(entries)


def _change_integer(program: bytes, chance: random.Random) -> bytes:
    """One of the numbers that the program pushes: elements, offset, sizes, strides."""
    places = [i for i, byte in enumerate(program[:-1]) if byte in b"KMJ" and i > 60]
    if not places:
        return program
    at = chance.choice(places)
    width = {b"K": 1, b"M": 2, b"J": 4}[program[at : at + 1]]
    old = int.from_bytes(program[at + 1 : at + 1 + width], "little")
    new = chance.choice((integer(chance), old + 1, old - 1, old * 2, 0, 1))
    return program[:at] + _push(new) + program[at + 1 + width :]


def _push(number: int) -> bytes:
    if 0 <= number < 2**8:
        return b"K" + number.to_bytes(1, "little")
    if 0 <= number < 2**16:
        return b"M" + number.to_bytes(2, "little")
    if -(2**31) <= number < 2**31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    return b"\x8a\x09" + number.to_bytes(9, "little", signed=True)


def _change_directory(blob: bytes, chance: random.Random) -> bytes:
    """Changes the central directory at the archive's end, which has the offsets and sizes."""
    start = max(0, len(blob) - chance.choice((22, 98, 400)))
    return blob[:start] + change_bytes(blob[start:], [blob[start:]], chance)


def _change_storage(blob: bytes, chance: random.Random) -> bytes:
    """Random values in the storages: still a valid upload."""
    return _archive([(n, chance.randbytes(len(data)) if "/data/" in n else data) for n, data in _entries(blob)])


def _exchange(blob: bytes, chance: random.Random) -> bytes:
    return chance.choice(OTHERS)


def _change_any(blob: bytes, chance: random.Random) -> bytes:
    return change_bytes(blob, OTHERS, chance)


CHANGES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    *(_change_entries, _change_program, _change_program, _change_program, _change_directory),
    *(_change_storage, _change_storage, _exchange, _change_any),
)
_RENAMED = (
    (b"LongStorage", b"FloatStorage"), (b"FloatStorage", b"LongStorage"), (b"LongStorage", b"HalfStorage"),
    (b"FloatStorage", b"DoubleStorage"), (b"cpu", b"cuda:0"), (b"cpu", b"meta"),
    (b"_rebuild_tensor_v2", b"_rebuild_parameter"),
    (b"torch._utils", b"os"), (b"X\x01\0\0\0" + b"0", b"X\x02\0\0\0" + b"00"), (b"\x89c", b"\x88c"),
)  # fmt: skip
_OPCODES = (b"0", b"2", b"(", b")", b"N", b".", b"Q", b"R", b"q\x00", b"h\x00", b"K\x01", b"cos\nsystem\n", b"\x80\x05")


def _entries(blob: bytes) -> Entries:
    """The entries of the archive; those of a valid one if an earlier change has broken it."""
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            return [(entry.filename, archive.read(entry)) for entry in archive.infolist()] or _entries(OTHERS[0])
    except Exception:  # a broken archive can raise anything
        return _entries(OTHERS[0])


def _archive(entries: Entries, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name or "x"), data, method)
    return buffer.getvalue()


def _others() -> Sequence[bytes]:
    """Other files of torch.save: views, other layouts and dtypes, no tensors at all, the format before zip."""
    ones = torch.ones(4, 12)
    inputs = torch.arange(4 * 12).reshape(4, 12)
    things = (
        *(ones, inputs, inputs.t(), inputs[:, ::2], inputs[1:3], inputs[:1].expand(4, 12), inputs[0], inputs.int()),
        *(
            ones[:, 0],
            torch.ones(2, requires_grad=True),
            torch.nn.Parameter(ones),
            ones.to_sparse(),
            torch.tensor(1.0),
            ones[:0],
        ),
        *(ones.to(torch.complex64), ones.bool()),
        *([ones], {"a": ones}, "text", 7, None, ones.numpy().tolist(), torch.zeros(4, device="meta")),
        *(torch.zeros(0, 5), torch.ones(1, 1, 1, 12), torch.ones([1] * 20), ones.untyped_storage()),
    )
    return [*map(saved, things), saved(ones, _use_new_zipfile_serialization=False), b"", b"PK\x05\x06" + bytes(18)]


OTHERS = _others()
