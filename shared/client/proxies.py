"""Chooses the proxy from the environment through which a server is reached, if any."""

import os
import ssl
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from shared.client.errors import UnusableProxy


def connection_options(url: str, tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Options of an httpx client for this server only: the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, unless
    NO_PROXY lists the server or it is on this machine: a remote proxy would connect to its own machine instead, and see
    the token. httpx by itself also reads proxies that the server does not need, and fails on invalid ones.

    tls: by default httpx's, which SSL_CERT_FILE may change. Raises UnusableProxy.
    """
    server = httpx.URL(url)
    here = is_this_machine(server.host)
    if here and server.scheme == "http":  # no TLS: creating httpx's context would read all CA certificates
        return {"trust_env": False, "verify": tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    options = {"trust_env": False, "verify": tls or httpx.create_ssl_context()}
    proxies = getproxies()
    kind = server.scheme if server.scheme in proxies else "all"
    if here or kind not in proxies or proxy_bypass(server.netloc.decode("ascii")):
        return options
    return {**options, "proxy": _proxy(proxies[kind], kind, server.host)}


def is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy(text: str, kind: str, host: str) -> httpx.Proxy:
    variable = next((name for name in os.environ if name.lower() == f"{kind}_proxy"), f"{kind.upper()}_PROXY")
    try:
        proxy = httpx.Proxy(text if "://" in text else f"http://{text}")
    except (ValueError, httpx.InvalidURL):
        scheme = text.partition("://")[0] if "://" in text else ""
        meant = " (write socks5://…)" if scheme.startswith("socks") else ""
        given = f", {scheme}://" if scheme else ""
        raise UnusableProxy(
            f"{variable} names a proxy that cannot be used{given}: it must begin with http://, https://, socks5:// or "
            f"socks5h://{meant}; or list {host} in NO_PROXY"
        ) from None
    if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
        raise UnusableProxy(
            f"{variable} names a {proxy.url.scheme}:// proxy, which needs a package: pip install 'httpx[socks]', "
            f"or list {host} in NO_PROXY"
        )
    return proxy
