"""A reward of the user's that differs between any two completions, whatever a model makes of its prompts."""

from zlib import crc32


def varied(completion: str) -> float:
    return crc32(completion.encode()) / 2**32
