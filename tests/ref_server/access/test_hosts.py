"""Which `Host` names the server accepts, and which pages may use it."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
import pytest

from ref_server.access.hosts import Hosts, is_loopback
from ref_server.access.keys import Denied
from ref_server.config import ServeConfig
from ref_server.service.service import Service

Serve = Callable[[Service], AbstractContextManager[httpx.Client]]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8400", 200),
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("[::1]:8400", 200),
        ("evil.example:8400", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.2", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_only_loopback_names_are_accepted(http: httpx.Client, host: str, status: int) -> None:
    response = http.get("/livez", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["field"] == "Host"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8400", 200),
        ("HTTP://127.0.0.1:8400", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8400", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_only_its_own_page_may_use_it(http: httpx.Client, origin: str, status: int) -> None:
    response = http.get("/v1/model", headers={"Host": "127.0.0.1:8400", "Origin": origin})
    assert response.status_code == status


def test_other_names_must_be_allowed(make_service: Callable[..., Service], serve: Serve) -> None:
    with serve(make_service(allowed_hosts=["Gpu-Box.example"])) as http:
        assert http.get("/livez", headers={"Host": "gpu-box.EXAMPLE:8400"}).status_code == 200
        refused = http.get("/livez", headers={"Host": "gpu-box:8400"})
        assert refused.status_code == 403
        assert "--allowed-hosts gpu-box" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (socket.gethostname().upper(), 200),
        ("localhost:8400", 200),
        ("192.168.1.2:8400", 200),
        ("[2001:db8::1]:8400", 200),
        ("trainer.example", 200),
        ("evil.example", 403),
        ("192.168.1.2.evil.example", 403),
        ("", 403),
    ],
)
def test_beyond_loopback_any_address_is_accepted(
    make_service: Callable[..., Service], serve: Serve, host: str, status: int
) -> None:
    """No page can have an IP address for its name, unless it comes from there."""
    with serve(make_service(host="0.0.0.0", insecure=True, allowed_hosts=["trainer.example"])) as http:
        assert http.get("/livez", headers={"Host": host}).status_code == status
        foreign = http.get("/livez", headers={"Host": host, "Origin": "http://evil.example:8401"})
        assert foreign.status_code == 403


def test_an_empty_host_is_refused_on_a_machine_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    with pytest.raises(Denied):
        Hosts("0.0.0.0", []).check("", None)


@pytest.mark.parametrize("name", ["http://gpu-box", "gpu-box:8400", "", "*", "a b", "[::1]"])
def test_an_allowed_host_has_no_scheme_and_no_port(name: str) -> None:
    with pytest.raises(ValueError, match="names without scheme and port"):
        ServeConfig(no_model=True, allowed_hosts=[name])


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.255.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu-box", False), ("", False)],
)
def test_listening_beyond_loopback_needs_tokens_or_insecure(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    assert ServeConfig(model="m", host=host, insecure=True).host == host
    if not local:
        with pytest.raises(ValueError, match=f"host: {host} .*--token-file.*--insecure"):
            ServeConfig(model="m", host=host)
        assert ServeConfig.model_validate({"model": "m", "host": host, "token": "x" * 16}).host == host
