"""What came over HTTP and how it was answered, in numbers. The labels are ours: no client can make new ones."""

from collections import Counter, defaultdict

from ref_server.metrics.histogram import Histogram

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class Traffic:
    """Written by one event loop, read from any thread.

    requests: by route, method and status. seconds: by route and method. errors: by status and code.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.errors: Counter[tuple[str, str]] = Counter()
        self.active = 0

    def add(self, route: str, method: str, status: int, code: str | None, seconds: float) -> None:
        """code: of the error that was answered, if any."""
        method = method if method in _METHODS else "other"
        self.requests[route, method, str(status)] += 1
        self.seconds[route, method].observe(seconds)
        if code is not None:
            self.errors[str(status), code] += 1
