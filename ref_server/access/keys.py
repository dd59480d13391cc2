"""Bearer tokens and their roles."""

import hmac
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from stat import S_IROTH
from typing import Self

from shared.api.tokens import TOKEN_CHARACTERS, is_token

MIN_TOKEN_CHARACTERS = 16


class Denied(Exception):
    """The request is not allowed. field: the header at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(Denied):
    """The request has no known token."""


class Role(IntEnum):
    """Each role includes those before it."""

    OPEN = 0
    """Anyone who reaches the server, without a token."""
    UPLOAD = 1
    """Upload batches, score, look at the server."""
    TRAIN = 2
    """Also lease batches, settle leases, look at batches."""
    ADMIN = 3
    """Everything."""


@dataclass(frozen=True)
class Keys:
    """The known tokens. Only digests are kept, so that printing this shows no token."""

    roles: dict[bytes, Role] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.roles)

    def role(self, authorization: str | None) -> Role:
        """The role of an `Authorization` header's token. Raises Unauthenticated if it is missing or unknown."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        # Compare with all tokens, each in constant time, so that the time taken says nothing about a token.
        found = [role for digest, role in self.roles.items() if hmac.compare_digest(digest, given)]
        if scheme.lower() == "bearer" and found:
            return max(found)
        what = "this token is not known here" if authorization else "a token is required: Authorization: Bearer TOKEN"
        raise Unauthenticated(what, "Authorization")

    def admit(self, authorization: str | None, wanted: Role) -> Role | None:
        """The role of the token; None if no token is required.

        Raises Unauthenticated, or Denied if the token is known but its role is insufficient.
        """
        if not self or wanted is Role.OPEN:
            return None
        role = self.role(authorization)
        if role < wanted:
            message = f"this needs a token of role {wanted.name.lower()}; yours is of role {role.name.lower()}"
            raise Denied(message, "Authorization")
        return role

    def __or__(self, other: Self) -> "Keys":
        return Keys({**self.roles, **other.roles})


def name(authorization: str | None) -> str:
    """A name for the token of an `Authorization` header that tells nothing about it."""
    return _digest((authorization or "").partition(" ")[2].strip()).hex()[:16]


def one_admin(token: str) -> Keys:
    """One token of role admin. Raises ValueError, whose message does not contain the token."""
    _check(token)
    return Keys({_digest(token): Role.ADMIN})


def read_keys(file: Path) -> Keys:
    """Reads lines of `ROLE TOKEN`, or of a token alone, which is an admin's. `#` begins a comment.

    Raises OSError, and ValueError, whose message has the line's number but not its text.
    """
    roles: dict[bytes, Role] = {}
    for number, line in enumerate(_text(file).splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            role, digest = _read_line(words)
            if digest in roles:
                raise ValueError("this token is in a line above")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        roles[digest] = role
    if not roles:
        raise ValueError(f"{file} holds no token")
    return Keys(roles)


def readable_by_all(file: Path) -> bool:
    """Whether every user of the machine can read `file`, and with it the tokens."""
    return bool(file.stat().st_mode & S_IROTH)


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text") from None


def _read_line(words: list[str]) -> tuple[Role, bytes]:
    names = {role.name.lower(): role for role in (Role.UPLOAD, Role.TRAIN, Role.ADMIN)}
    *name, token = words
    if len(name) > 1 or (name and name[0] not in names):
        raise ValueError(f"must be ROLE TOKEN, ROLE one of {', '.join(names)}")
    _check(token)
    return names[name[0]] if name else Role.ADMIN, _digest(token)


def _check(token: str) -> None:
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(f"a token has at least {MIN_TOKEN_CHARACTERS} characters, or it can be guessed")
    if not is_token(token):
        raise ValueError(f"a token is made of {TOKEN_CHARACTERS}, or no header can carry it")


def _digest(token: str) -> bytes:
    return sha256(token.encode("latin-1", "replace")).digest()
