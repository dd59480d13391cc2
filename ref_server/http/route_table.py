"""Finds the requirement of a request by method and path, before the router sees it."""

import re
from collections.abc import Iterable, Set
from typing import Any

from ref_server.access.keys import Role
from ref_server.access.requirements import UNDECLARED, Requirement, requirement_of

# The dashboard's page is open: it asks for a token itself.
_DASHBOARD = ({"GET"}, re.compile("/"), Requirement(Role.OPEN))


class RouteTable:
    """The routes that an application had when the table was built."""

    def __init__(self, routes: Iterable[Any]) -> None:
        self._routes: list[tuple[Set[str], re.Pattern[str], Requirement]] = [
            _DASHBOARD,
            *((route.methods, route.path_regex, requirement_of(route)) for route in routes),
        ]

    def role(self, method: str, path: str) -> Role:
        """path: as the router sees it, percent-decoded. If several routes match, the greatest role is required."""
        asked = "GET" if method == "HEAD" else method
        roles = [found.role for methods, found in self._at(path) if asked in methods]
        return max(roles, default=UNDECLARED.role)

    def media_types(self, path: str) -> tuple[str, ...]:
        """Media types that a POST or PUT to this path accepts; empty: any."""
        return next((found.media_types for _, found in self._at(path) if found.media_types), ())

    def _at(self, path: str) -> Iterable[tuple[Set[str], Requirement]]:
        return ((methods, found) for methods, pattern, found in self._routes if pattern.fullmatch(path))
