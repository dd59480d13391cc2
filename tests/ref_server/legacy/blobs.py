"""Blobs that `torch.save` never wrote, and uploads made of blobs."""

import io
import zipfile
from collections.abc import Mapping

import torch

from tests.ref_server.legacy.simple_grpo import make_bytes_list, tensor_to_bytes

INPUTS = torch.arange(10).reshape(2, 5)
REWARDS = torch.tensor([0.5, -0.5])
GEN_LOGPS = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])


def upload(**parts: bytes) -> bytes:
    """A good upload of three parts (plen 3, B 2, L 5), but for the parts that are given."""
    good = {"base": b'{"plen": 3}', "inputs": tensor_to_bytes(INPUTS), "rewards": tensor_to_bytes(REWARDS)}
    return make_bytes_list(list((good | parts).values()))


def pickle_of(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    elements: int,
    offset: int = 0,
    storage: str = "LongStorage",
    key: str = "0",
    key_length: int | None = None,
) -> bytes:
    """The program of one tensor, as torch.save writes it, about any numbers."""
    length = len(key) if key_length is None else key_length
    return b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\0\0\0storageq\x01",
            f"ctorch\n{storage}\nq\x02X".encode(), bytes([length]), b"\0\0\0", key.encode(),
            b"q\x03X\x03\0\0\0cpuq\x04", integer(elements), b"tq\x05Q",
            integer(offset), numbers(size, 6), numbers(stride, 7),
            b"\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b.",
        ]
    )  # fmt: skip


def integer(value: int) -> bytes:
    """As Python pickles it with protocol 2."""
    if 0 <= value < 2**8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 2**16:
        return b"M" + value.to_bytes(2, "little")
    if -(2**31) <= value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    encoded = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def numbers(values: tuple[int, ...], memo: int) -> bytes:
    pushed = b"".join(map(integer, values))
    if not values:
        return b")"
    put = b"q" + bytes([memo])
    return b"(" + pushed + b"t" + put if len(values) > 3 else pushed + bytes([0x84 + len(values)]) + put


def entries_of(program: bytes, storage: bytes) -> dict[str, bytes]:
    """What an archive needs, in the form of PyTorch 1.6 to 2.0."""
    return {"archive/data.pkl": program, "archive/data/0": storage, "archive/version": b"3\n"}


def archive(entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return buffer.getvalue()
