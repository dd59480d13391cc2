"""Changes to bytes and to JSON that reach beyond a parser's first check."""

import json
import random
import re
from collections.abc import Sequence

INTEGERS = (0, 1, 2, 7, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
_TEXTS = ("", "a", "\0", "\ud800", "é", "I64", "F32", "BOOL", "F64", "U8", "F4", "dtype", "shape", "__metadata__")
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[\[\]{}:,]|[^\s]', re.DOTALL)
_DEEP = (1000, 30_000)


def integer(chance: random.Random) -> int:
    """A limit of an integer type or a number next to one, of either sign."""
    return chance.choice(INTEGERS) * chance.choice((1, 1, 1, -1)) + chance.choice((0, 0, 0, 1, -1))


def change_bytes(body: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Flips, sets, cuts, inserts or splices, without knowing what the bytes mean."""
    changed = bytearray(body)
    places = range(len(changed) + 1)
    start, end = sorted((chance.choice(places), chance.choice(places)))
    match chance.randrange(7):
        case 0 | 1:
            for _ in range(chance.choice((1, 1, 1, 2, 8))):
                if changed:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        case 2:
            width = chance.choice((1, 2, 4, 8))
            order = "little" if chance.random() < 0.5 else "big"
            changed[start : start + width] = (integer(chance) % 256**width).to_bytes(width, order)
        case 3:
            del changed[start:]
        case 4:
            del changed[start : start + chance.choice((1, 4, 8, 64))]
        case 5:
            changed[start:start] = chance.randbytes(chance.choice((1, 4, 8, 64)))
        case _:
            other = chance.choice(others)
            changed[start:end] = other[start:end]
    return bytes(changed)


def change_json(text: bytes, chance: random.Random) -> bytes:
    """Replaces, drops, doubles or exchanges tokens: most results are still JSON."""
    tokens = _JSON_TOKEN.findall(text)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if not tokens:
            break
        place, other = chance.randrange(len(tokens)), chance.randrange(len(tokens))
        match chance.randrange(16):
            case choice if choice < 11:
                tokens[place] = _alike(tokens[place], tokens, chance)
            case 11:
                del tokens[place]
            case 12:
                tokens.insert(place, tokens[other])
            case 13:
                tokens[place], tokens[other] = tokens[other], tokens[place]
            case 14:
                start, end = sorted((place, other))
                tokens[end:end] = tokens[start : min(end, start + 12)]
            case _:
                tokens[place] = _any_value(chance)
    return b"".join(tokens)


def _alike(token: bytes, tokens: Sequence[bytes], chance: random.Random) -> bytes:
    """Another token of the same kind."""
    if token.startswith(b'"'):
        strings = [other for other in tokens if other.startswith(b'"')]
        return chance.choice(strings) if chance.random() < 0.6 else json.dumps(chance.choice(_TEXTS)).encode()
    if token[-1:].isdigit():
        near = token.isdigit() and len(token) < 20 and chance.random() < 0.3
        return str(int(token) + chance.choice((1, -1, 8)) if near else integer(chance)).encode()
    return chance.choice((b"[", b"]", b"{", b"}", b",", b":"))


def _any_value(chance: random.Random) -> bytes:
    depth = chance.choice(_DEEP)
    simple = (b"null", b"true", b"[]", b"{}", b"1.5", b"1e999", b"-0", b"NaN")
    return chance.choice((*simple, b"9" * 5000, b"[" * depth, b'{"a":' * depth))
