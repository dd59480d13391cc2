"""What a route says of itself where it stands: which role may use it, and which bodies it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ref_server.access.keys import Role

T = TypeVar("T")

JSON = "application/json"


@dataclass(frozen=True)
class Requirement:
    """role: the smallest that may use the route. media_types: of its body; none are checked where none are named."""

    role: Role
    media_types: tuple[str, ...] = ()


# What says nothing of itself is for admins.
UNDECLARED = Requirement(Role.ADMIN)


def requires(role: Role, *media_types: str) -> Callable[[T], T]:
    """Decorates a route, or the function that answers it. The guard and the OpenAPI page read it."""

    def declare(route: T) -> T:
        setattr(route, _NAME, Requirement(role, media_types))
        return route

    return declare


def requirement_of(route: Any) -> Requirement:
    """What a route, or its endpoint, declares."""
    return getattr(route, _NAME, None) or getattr(getattr(route, "endpoint", None), _NAME, UNDECLARED)


_NAME = "__tandem_requirement__"
