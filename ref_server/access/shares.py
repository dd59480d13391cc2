"""Shares something limited among clients, without a list of them."""

from collections import Counter


class Shares:
    """An amount of which a holder may hold at most as much as is free: used on the event loop.

    One holder alone gets half of it, n holders that want all get 1 / (n + 1) each, and something is always free for a
    newcomer: the dynamic threshold of shared-memory switches with alpha = 1 (Choudhury and Hahne 1998).

    A holder is any name: the server's are `holder` of a request's state, and the addresses of peers.
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
