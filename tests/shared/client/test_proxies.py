"""Which proxy from the environment is used: none for this machine or for servers that NO_PROXY lists."""

import ssl
from typing import Any

import httpx
import pytest

from policy_trainer.config import HttpRewardConfig
from policy_trainer.rewards.http_reward import HttpReward
from policy_trainer.rollout.sampling.vllm_client import ask
from shared.client import RefServerClient, UnusableProxy
from shared.client.proxies import connection_options
from tests.site import Answer

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ELSEWHERE = "http://gpu.example:8400"
CANNOT_BE_USED = [
    ("ALL_PROXY", "socks5://127.0.0.1:1080", r"pip install 'httpx\[socks\]'"),
    ("all_proxy", "socks5h://u:secret@127.0.0.1:1080", r"all_proxy names a socks5h:// proxy"),
    ("ALL_PROXY", "socks://127.0.0.1:1080", r"cannot be used, socks://.*write socks5://"),
    ("HTTP_PROXY", "ftp://127.0.0.1:1080", r"HTTP_PROXY .*cannot be used, ftp://"),
    ("http_proxy", "http://proxy:port", r"http_proxy .*cannot be used"),
]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def proxy_of(url: str) -> str | None:
    proxy = connection_options(url).get("proxy")
    return proxy and str(proxy.url)


async def _nothing(client: Any) -> None:
    pass


def use_all(url: str) -> None:
    """Creates everything that speaks HTTP to a server at this URL."""
    RefServerClient(url).close()
    HttpReward(url, HttpRewardConfig()).scores([])
    ask(url, _nothing)


@pytest.mark.parametrize("url", ["https://127.0.0.1:8400", ELSEWHERE])
def test_only_plain_http_to_this_machine_reads_no_certificates(url: str) -> None:
    """A proxy of another server may need TLS. What has no certificates trusts nobody."""
    plain, other = (connection_options(each)["verify"] for each in ("http://127.0.0.1:8400", url))
    assert plain.cert_store_stats()["x509_ca"] == 0 < other.cert_store_stats()["x509_ca"]
    assert plain.verify_mode == other.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", "api.localhost"])
def test_this_machine_needs_no_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, _ in CANNOT_BE_USED:
        monkeypatch.setenv(variable, value)
    assert proxy_of(f"http://{host}:8400") is None
    if host == "127.0.0.1":
        use_all(f"http://{host}:8400")


@pytest.mark.parametrize(("variable", "value", "message"), CANNOT_BE_USED)
def test_what_a_proxy_lacks_is_said(variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    made: list[Any] = [RefServerClient, lambda url: HttpReward(url, HttpRewardConfig()), lambda url: ask(url, _nothing)]
    for make in made:
        with pytest.raises(UnusableProxy, match=message) as refused:
            make(ELSEWHERE)
        assert "gpu.example in NO_PROXY" in str(refused.value) and "secret" not in str(refused.value)
    monkeypatch.setenv("NO_PROXY", "other.example,.example")
    use_all(ELSEWHERE)


def test_the_proxy_of_the_scheme_goes_before_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("ALL_PROXY", "http://all.example:3128")
    assert proxy_of("https://gpu.example") == "http://proxy.example:3128"
    assert proxy_of(ELSEWHERE) == "http://all.example:3128"
    monkeypatch.setenv("NO_PROXY", "gpu.example:8400")
    assert proxy_of(ELSEWHERE) is None
    assert proxy_of("http://gpu.example:8401") == "http://all.example:3128"


def test_a_server_elsewhere_is_reached_through_the_proxy(open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = open_site(lambda request: Answer(headers={"X-Seen": "1"}))
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    with httpx.Client(**connection_options(ELSEWHERE)) as http:
        assert http.get(f"{ELSEWHERE}/v1/model").headers["X-Seen"] == "1"
    assert [request.headers["host"] for request in proxy.requests] == ["gpu.example:8400"]
