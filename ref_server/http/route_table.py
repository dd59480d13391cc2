"""Finds the requirement of a request by method and path, before the router sees it."""

import re
from collections.abc import Iterable, Set
from typing import Any

from ref_server.access.requirements import UNDECLARED, Requirement, requirement_of

_NOWHERE = re.compile("")


class RouteTable:
    """The routes that an application had when the table was built."""

    def __init__(self, routes: Iterable[Any]) -> None:
        self._routes: list[tuple[Set[str], re.Pattern[str], Requirement]] = [
            (route.methods, route.path_regex, requirement_of(route)) for route in routes
        ]

    def find(self, method: str, path: str) -> tuple[str, Requirement]:
        """A name of the route, and its requirement; of several that match, those of the one with the greatest role.
        Where there is none, an empty name.

        path: as the router sees it, percent-decoded.
        """
        asked = "GET" if method == "HEAD" else method
        at = ((one, found) for methods, one, found in self._routes if asked in methods and one.fullmatch(path))
        pattern, requirement = max(at, key=lambda each: each[1].role, default=(_NOWHERE, UNDECLARED))
        return pattern.pattern, requirement
