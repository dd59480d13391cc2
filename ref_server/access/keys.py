"""Bearer tokens and their roles."""

import hmac
import re
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from stat import S_IROTH
from typing import Self

from shared.api.base import TOKEN_CHARACTERS, is_token

MIN_TOKEN_CHARACTERS = 16
_NAME = re.compile("[A-Za-z0-9._@-]{1,64}")


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
    METRICS = 1
    """Read /metrics."""
    UPLOAD = 2
    """Also upload batches, score, read the server's state."""
    TRAIN = 3
    """Also lease batches, settle leases, look at batches."""
    ADMIN = 4
    """Everything."""


@dataclass(frozen=True)
class Principal:
    """Whom a token belongs to. name: from the file, else one that reveals nothing about the token.

    run: the only run that the token may be used for; None: all.
    """

    role: Role
    name: str
    run: str | None = None

    @property
    def token(self) -> str:
        """The name of the token; empty for a client without one, whose `name` is its address."""
        return self.name if self.role else ""

    def require(self, wanted: Role) -> None:
        """Raises Denied for a role that does not include the wanted one."""
        if self.role < wanted:
            message = f"this needs a token of role {wanted.name.lower()}; yours is of role {self.role.name.lower()}"
            raise Denied(message, "Authorization")

    def only(self, run: str | None) -> str | None:
        """The run that a request is about; if it names none, the token's. Raises Denied for another run."""
        if self.run is not None and run not in (None, self.run):
            raise Denied(f"this token is for run {self.run!r} only", "Authorization")
        return run if self.run is None else self.run


# The principal of a request where no token is required.
ANYBODY = Principal(Role.OPEN, "")


@dataclass(frozen=True)
class Keys:
    """The known tokens. Only digests are kept, so that printing this shows no token."""

    principals: dict[bytes, Principal] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.principals)

    def principal(self, authorization: str | None) -> Principal:
        """Whose token an `Authorization` header has. Raises Unauthenticated if it is missing or unknown."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        # Compare with all tokens, each in constant time, so that the time taken says nothing about a token.
        matching = [principal for digest, principal in self.principals.items() if hmac.compare_digest(digest, given)]
        if scheme.lower() == "bearer" and matching:
            return matching[0]
        what = "this token is not known here" if authorization else "a token is required: Authorization: Bearer TOKEN"
        raise Unauthenticated(what, "Authorization")

    def __or__(self, other: Self) -> "Keys":
        return Keys({**self.principals, **other.principals})


def one_admin(token: str) -> Keys:
    """One token of role admin. Raises ValueError, whose message does not contain the token."""
    _check(token)
    return Keys({_digest(token): Principal(Role.ADMIN, _name(token))})


def read_keys(file: Path) -> Keys:
    """Reads lines of `ROLE TOKEN [name=NAME] [run=RUN]`, or of just a token, an admin's. `#` begins a comment.

    Raises OSError, and ValueError, whose message has the line's number but not its text.
    """
    principals: dict[bytes, Principal] = {}
    for number, line in enumerate(_text(file).splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            digest, principal = _read_line(words)
            if digest in principals:
                raise ValueError("this token is in a line above")
            if principal.name in {other.name for other in principals.values()}:
                raise ValueError("this name is in a line above")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        principals[digest] = principal
    if not principals:
        raise ValueError(f"{file} holds no token")
    return Keys(principals)


def readable_by_all(file: Path) -> bool:
    """Whether every user of the machine can read `file`, and with it the tokens."""
    return bool(file.stat().st_mode & S_IROTH)


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text") from None


def _read_line(words: list[str]) -> tuple[bytes, Principal]:
    # A name is marked as one, or a token in its place would be logged.
    named = dict(word.split("=", 1) for word in words[1:] if word.startswith(("name=", "run=")))
    *role, token = words[: len(words) - len(named)]
    roles = {role.name.lower(): role for role in Role if role}
    if len(role) > 1 or (role and role[0] not in roles):
        raise ValueError(f"must be ROLE TOKEN, then name=NAME and run=RUN if wanted, ROLE one of {', '.join(roles)}")
    _check(token)
    principal = Principal(roles[role[0]] if role else Role.ADMIN, named.get("name", _name(token)), named.get("run"))
    if not _NAME.fullmatch(principal.name):
        raise ValueError("a name has 1 to 64 letters, digits and - . _ @")
    if principal.run is not None and (not principal.run or principal.role not in (Role.UPLOAD, Role.TRAIN)):
        raise ValueError("run=RUN names the one run of a token of role upload or train")
    return _digest(token), principal


def _name(token: str) -> str:
    return _digest(token).hex()[:16]


def _check(token: str) -> None:
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(f"a token has at least {MIN_TOKEN_CHARACTERS} characters, or it can be guessed")
    if not is_token(token):
        raise ValueError(f"a token is made of {TOKEN_CHARACTERS}, or no header can carry it")


def _digest(token: str) -> bytes:
    return sha256(token.encode("latin-1", "replace")).digest()
