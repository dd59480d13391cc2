"""Declares, at each route, the role that it requires and the media types that it accepts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ref_server.access.keys import Role

T = TypeVar("T")

JSON = "application/json"
# For a route that takes a body of any kind, or of none that is named.
ANY = "*/*"


@dataclass(frozen=True)
class Requirement:
    """role: the least that may use the route. media_types: accepted for its body; empty: it takes no body.

    confines: it keeps a token of a single run to that run (`Principal.only`), or shows nothing of any run. Others are
    closed to such tokens. audited: each of its requests is logged, with who sent it. streamed: the route writes the
    body to the disk as it arrives, since it may not fit the memory. Any other body is bounded by `max_body_mib`, and
    read by the guard before the route is called, so that no route waits for a slow client.
    """

    role: Role
    media_types: tuple[str, ...] = ()
    confines: bool = False
    audited: bool = False
    streamed: bool = False


# A route without a declaration is for admins.
UNDECLARED = Requirement(Role.ADMIN)


def requires(
    role: Role,
    *media_types: str,
    confines: bool = False,
    audited: bool = False,
    streamed: bool = False,
) -> Callable[[T], T]:
    """Decorates a route, or the function that answers it. The guard and the OpenAPI page read the requirement."""

    def declare(route: T) -> T:
        setattr(route, _NAME, Requirement(role, media_types, confines, audited, streamed))
        return route

    return declare


def requirement_of(route: Any) -> Requirement:
    """What a route, or its endpoint, declares."""
    return getattr(route, _NAME, None) or getattr(getattr(route, "endpoint", None), _NAME, UNDECLARED)


_NAME = "__tandem_requirement__"
