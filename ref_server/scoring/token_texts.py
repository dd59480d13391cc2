"""The text of each token by itself.

A token may hold a part of a character only. A tokenizer decodes that as U+FFFD, the replacement character, as if the
model had written it; here its bytes are escaped.
"""

from collections.abc import Callable, Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# SentencePiece writes a word's blank so, and drops it where a text begins: each single token is such a beginning.
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def token_texts(decode: Callable[[list[int]], Any], piece_of: Callable[[int], Any], ids: Sequence[int]) -> list[str]:
    """The text of each id; the empty text for ids that the tokenizer does not know.

    decode, piece_of: of a tokenizer, ids -> their text and an id -> its piece of the vocabulary.
    """
    texts = {id: _text(str(decode([id])), piece_of(id)) for id in set(ids)}
    return [texts[id] for id in ids]


def _text(text: str, piece: Any) -> str:
    if not isinstance(piece, str):
        return text
    if _UNKNOWN in text:
        return _escaped(piece)
    return f" {text}" if piece.startswith(_BLANK) and not text.startswith(" ") else text


def _escaped(piece: str) -> str:
    """The bytes of a byte-level vocabulary's piece, those that are no whole character as `\\xe2`; else the piece."""
    if not all(character in _BYTES for character in piece):
        return piece
    return bytes(_BYTES[character] for character in piece).decode(errors="backslashreplace")
