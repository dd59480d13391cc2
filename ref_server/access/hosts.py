"""Checks `Host` and `Origin`, so that a web page cannot drive the server.

A page can send requests to any address, and its name can be made to resolve to this machine (DNS rebinding). But it
cannot choose what a browser writes into `Host` and `Origin`. A literal IP address is safe: no other site has it as its
name.
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address

from ref_server.access.keys import Denied


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Hosts:
    """The names that a server at `listening` accepts in `Host`: loopback names, and `allowed`.

    A server that listens beyond loopback also accepts any IP address and the machine's name.
    """

    def __init__(self, listening: str, allowed: Iterable[str]) -> None:
        self._beyond = not is_loopback(listening)
        names = {socket.gethostname().lower(), listening.lower()} if self._beyond else set()
        # An empty Host is never accepted, even where the machine has no name.
        self._names = ({name.lower() for name in allowed} | names) - {""}

    def check(self, host: str, origin: str | None) -> None:
        """Raises Denied on an unexpected `Host` or a foreign `Origin`; None: the request has no such header."""
        host = host.lower()
        if not self._expects(_name(host)):
            name = _name(host)[:80]
            remedy = f"; if that is its name, start it with --allowed-hosts {name}" if name else ""
            raise Denied(f"Host {host[:80]!r} is not known to be this server{remedy}", "Host")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise Denied(f"a page of {origin[:80]} may not use this server", "Origin")

    def _expects(self, name: str) -> bool:
        return is_loopback(name) or name in self._names or (self._beyond and _is_address(name))


def _name(host: str) -> str:
    """The name in a `Host` header, without its port. IPv6 addresses are in brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
