"""Shares something limited among clients, without a list of them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address


class Shares:
    """An amount of which a holder may hold at most as much as is free: used on the event loop.

    One holder gets half of it, n holders that want all get 1 / (n + 1) each, and something is always free for a
    newcomer: the dynamic threshold of shared-memory switches with alpha = 1 (Choudhury and Hahne 1998).

    A holder is any name. The guard writes that of a request into its state: `scope["state"]["holder"]`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()
        self._free = most

    def take(self, holder: str, size: int = 1) -> bool:
        """Whether `holder` got `size` more. False if it would then hold more than is free."""
        if self._held[holder] + size > self._free - size:
            return False
        self._held[holder] += size
        self._free -= size
        return True

    def give(self, holder: str, size: int = 1) -> None:
        """Gives back what was taken."""
        self._free += size
        self._held[holder] -= size
        if not self._held[holder]:
            del self._held[holder]

    @contextmanager
    def hold(self, holder: str) -> Iterator[Callable[[int], bool]]:
        """A `take` for one piece of work: a context manager that gives back what was taken."""
        got = 0

        def take(size: int) -> bool:
            nonlocal got
            given = self.take(holder, size)
            got += size * given
            return given

        try:
            yield take
        finally:
            self.give(holder, got)


def peer(address: str) -> str:
    """The holder that an address stands for: a client with one IPv6 address has all 2^64 of its network."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped:
        return address
    return f"{ip.exploded[:19]}::/64"
