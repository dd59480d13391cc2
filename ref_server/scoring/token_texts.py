"""The text of each token alone, as people look at it.

A token may hold a part of a character only. A tokenizer decodes that as U+FFFD, the replacement character, as if the
model had written it; here its bytes are escaped.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# SentencePiece writes a word's blank so, and drops it where a text begins: each token alone is such a beginning.
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each id; the empty text for ids that the tokenizer does not know."""
    texts = {id: _text(tokenizer, id) for id in set(ids)}
    return [texts[id] for id in ids]


def _text(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    text = str(tokenizer.decode([id]))
    piece = tokenizer.convert_ids_to_tokens(id)
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
