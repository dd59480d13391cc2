"""Untrusted safetensors bytes -> metadata and tensors, checked.

The header is checked before anything else is read. Lengths in the header are checked against the body before memory is
allocated.
"""

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors

from shared.batch import Array, BatchError

MAX_HEADER_BYTES = 64 * 1024

_DTYPES: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "I32": np.int32,
    "F32": np.float32,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
_IMAGE_DTYPES = ("F32", "U8", "I64")
# Of a tensor's entry in the header.
_PART_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Layout:
    """The tensors and metadata that a kind of file may hold.

    noun: names the kind in messages. dtypes: I64, I32, F32 or BOOL by tensor of one dimension. prefix: of further ones,
    which are F32. image_prefix: of tensors that have any shape, and the dtype F32, U8 or I64.
    header_bytes: the longest header by metadata's `format`; MAX_HEADER_BYTES for others.
    """

    noun: str
    dtypes: Mapping[str, str]
    metadata: Set[str]
    prefix: str | None = None
    image_prefix: str | None = None
    header_bytes: Mapping[str, int] = field(default_factory=dict)

    def has_any_shape(self, tensor: str) -> bool:
        return self.image_prefix is not None and tensor.startswith(self.image_prefix)

    def allowed_dtypes(self, tensor: str) -> tuple[str, ...]:
        """The dtypes that a tensor may have; none if such a file may not have it."""
        if self.has_any_shape(tensor):
            return _IMAGE_DTYPES
        if self.prefix is not None and tensor.startswith(self.prefix):
            return ("F32",)
        return (self.dtypes[tensor],) if tensor in self.dtypes else ()

    def check_header_size(self, size: int, format: str | None) -> None:
        """Raises BatchError."""
        most = self.header_bytes.get(format or "", MAX_HEADER_BYTES)
        if size > most:
            raise BatchError("header", f"must be at most {most} bytes, got {size}")

    def check_any_header_size(self, size: int) -> None:
        """By the format that allows the longest header. Raises BatchError."""
        self.check_header_size(size, max(self.header_bytes, key=self.header_bytes.__getitem__, default=None))


def parse(body: bytes, layout: Layout) -> tuple[dict[str, str], dict[str, Array]]:
    """Untrusted bytes -> metadata and tensors, as the layout has them. Raises BatchError."""
    metadata, names = read_header(body, layout)
    for name in names:
        if not layout.allowed_dtypes(name):
            raise BatchError(name[:80], f"is not a tensor of a {layout.noun}")
    try:
        parts = safetensors.deserialize(body)
    except safetensors.SafetensorError as error:
        raise BatchError("body", f"must be a safetensors file: {error}") from None
    tensors: dict[str, Array] = {}
    for name, part in sorted(parts, key=lambda named: named[0]):  # safetensors returns them in any order
        allowed = layout.allowed_dtypes(name)
        if part["dtype"] not in allowed:
            raise BatchError(name[:80], f"must have dtype {' or '.join(allowed)}, got {part['dtype']}")
        any_shape = layout.has_any_shape(name)
        if len(part["shape"]) != 1 and not any_shape:
            raise BatchError(name, f"must have one dimension, got shape {part['shape'][:8]}")
        data = bytes(part["data"])
        if part["dtype"] == "BOOL" and data.strip(b"\0\1"):
            raise BatchError(name, "must hold the bytes 0 and 1 only")
        flat = np.frombuffer(data, dtype=_DTYPES[part["dtype"]])
        tensors[name] = flat.reshape(part["shape"]) if any_shape else flat
    return metadata, tensors


def read_header(body: bytes, layout: Layout) -> tuple[dict[str, str], list[str]]:
    """Metadata and tensor names from the JSON header. Checks the header's claimed length first. Raises BatchError."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > len(body) - 8:
        raise BatchError("body", f"must be a safetensors file; its {len(body)} bytes do not hold the header they claim")
    layout.check_any_header_size(size)  # before parsing
    try:
        header = json.loads(body[8 : 8 + size], object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise BatchError("header", f"must be a JSON object with unique keys: {error}") from None
    if not isinstance(header, dict):
        raise BatchError("header", "must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BatchError("__metadata__", "must map strings to strings")
    for name in metadata:
        if name not in layout.metadata:
            raise BatchError(name[:80], f"is not a metadata key of a {layout.noun}")
    for name, part in header.items():
        # Safetensors ignores other keys. Their values could become longer when `splice` writes them again.
        if isinstance(part, dict) and not part.keys() <= _PART_KEYS:
            raise BatchError(name[:80], f"must have only {', '.join(sorted(_PART_KEYS))} in the header")
    layout.check_header_size(size, metadata.get("format"))
    return metadata, list(header)


def splice(body: bytes, added: bytes) -> bytes:
    """A file with the tensors and the metadata of two files; where both have a metadata key, that of `added` counts.

    No tensor is decoded: the headers are merged, and the data is copied. Both files are trusted, since `parse` has
    checked them, and `added` holds only F32. Its data goes behind the last tensor whose numbers have more than one
    byte, so that all stay aligned, as some readers require.
    """
    header, data = _split(body)
    further, further_data = _split(added)
    place = max((part["data_offsets"][1] for part in header.values() if _is_wide(part)), default=0)
    metadata = header.pop("__metadata__", {}) | further.pop("__metadata__", {})
    for part in header.values():
        if part["data_offsets"][0] >= place:
            part["data_offsets"] = [end + len(further_data) for end in part["data_offsets"]]
    for part in further.values():
        part["data_offsets"] = [end + place for end in part["data_offsets"]]
    merged = {"__metadata__": metadata, **header, **further}
    text = json.dumps(merged, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, data[:place], further_data, data[place:]])


def _split(body: bytes) -> tuple[dict[str, Any], memoryview]:
    """The JSON header of a file, and its data."""
    start = 8 + int.from_bytes(body[:8], "little")
    return json.loads(body[8:start]), memoryview(body)[start:]


def _is_wide(part: Mapping[str, Any]) -> bool:
    """Whether a header's entry is a tensor whose numbers have more than one byte."""
    return part.get("dtype") in _DTYPES and np.dtype(_DTYPES[part["dtype"]]).itemsize > 1


def required(mapping: Mapping[str, Any], name: str) -> Any:
    """Raises BatchError if it is missing."""
    if name not in mapping:
        raise BatchError(name, "is missing")
    return mapping[name]


def number(metadata: Mapping[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    """Parses a decimal number. Refuses `1_0`, ` 1 ` and non-ASCII digits, which Python's own parsers accept."""
    text = required(metadata, name)
    pattern = r"-?[0-9]{1,19}" if kind is int else r"-?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?"
    if not re.fullmatch(pattern, text, re.ASCII):
        raise BatchError(name, f"must be a decimal {'integer' if kind is int else 'number'}, got {text[:40]!r}")
    return kind(text)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    for key in mapping:
        key.encode()  # raises ValueError for a lone surrogate: an error could not name such a key in UTF-8
    return mapping
