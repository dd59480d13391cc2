"""Whether the Hugging Face Hub can be asked at all."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


@contextmanager
def asked_if_there() -> Iterator[None]:
    """Within it, datasets come from the cache alone where the Hub's host has no address.

    Without a network the hub's library tries six times, for half a minute, before it looks into the cache. A hub that
    has an address may be slow, and is waited for.
    """
    from datasets import config  # slow to import

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not _has_address(urlsplit(config.HF_ENDPOINT).hostname)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _has_address(host: str | None) -> bool:
    """True behind a proxy, too: it may know the address."""
    if getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
