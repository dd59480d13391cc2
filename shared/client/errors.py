"""The errors of the client, made from httpx's errors and responses."""

import ssl
from http import HTTPStatus
from textwrap import shorten

import httpx

from shared.errors import printable


class ClientError(Exception):
    """A request failed. The message says why and what may help. The server's text in it is escaped, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class Unreachable(ClientError):
    """No server answers at the URL, or the connection broke.

    passes: waiting may help. done: the request may have reached the server and been carried out.
    """

    def __init__(self, url: str, reason: str, *, passes: bool, done: bool) -> None:
        super().__init__(f"no server answers at {url} ({reason})")
        self.reason = _one_line(reason)
        self.passes = passes
        self.done = done


class Untrusted(Unreachable):
    """The server's certificate cannot be verified. Waiting does not help."""


class UnusableProxy(ClientError):
    """The environment names a proxy that cannot be used."""


class NotRefServer(ClientError):
    """The server at the URL is not a reference server, or its version is unknown to this client."""


class WrongContent(ClientError):
    """A downloaded file of published weights does not match its manifest."""


class UnusableBatch(ClientError):
    """The batch of a lease has an invalid value: give it back with `release` and an error.

    id, token: of the lease. field: the tensor or metadata key at fault.
    """

    def __init__(self, id: str, token: str, field: str, reason: str) -> None:
        super().__init__(f"batch {id} cannot be used: {reason}")
        self.id = id
        self.token = token
        self.field = _one_line(field)
        self.reason = _one_line(reason)


class RefServerError(ClientError):
    """The server answered with an error.

    status: the HTTP status. code: the API's error code; None if something else answered, such as a gateway.
    field: the invalid part of the request, if known. request_id: identifies the request in the server's log.
    retry_after: seconds, from the Retry-After header, if there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"the reference server answered {status}: {message}" if code else f"the answer was {message}")
        self.status = status
        self.message = _one_line(message)
        self.code = code
        self.field = field
        self.request_id = request_id
        self.retry_after = retry_after


_LONGEST_SECONDS = 3600.0
_LONGEST_MESSAGE = 4000
# Without our JSON these are another server's. Others may be of a proxy or a gateway in between.
_NOT_OURS = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


def refusal(response: httpx.Response, url: str) -> RefServerError | NotRefServer:
    """The error of a response that is not a success. url: where the server should be."""
    about: dict[str, str | None] = {"request_id": response.headers.get("X-Request-Id")}
    try:
        error = response.json()["error"]
        message = str(error["message"])
        about |= {name: error.get(name) for name in ("code", "field")}
        about["request_id"] = error.get("request_id") or about["request_id"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message = f"{response.status_code} {response.reason_phrase}{_excerpt(response)}"
        if response.is_redirect or response.status_code in _NOT_OURS:
            return NotRefServer(f"the server at {url} is not a reference server: it says {message}")
    return RefServerError(response.status_code, message, retry_after=retry_after(response), **about)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds, from the Retry-After header; an hour at most, whatever a server asks for."""
    header = response.headers.get("Retry-After", "")
    return min(float(header), _LONGEST_SECONDS) if header.isdecimal() else None


def _one_line(text: str) -> str:
    return printable(" ".join(text[:_LONGEST_MESSAGE].split()))


def _excerpt(response: httpx.Response) -> str:
    """The beginning of a text. The pages of other servers are left out."""
    html = "html" in response.headers.get("Content-Type", "") or response.text.lstrip().startswith("<")
    text = "" if html else shorten(response.text, 200, placeholder=" …")
    return f": {text}" if text else ""


def unreachable(error: httpx.TransportError | httpx.InvalidURL, url: str) -> Unreachable:
    """The error of a failed connection."""
    tls: BaseException | None = error
    while tls is not None and not isinstance(tls, ssl.SSLError):
        tls = tls.__cause__ or tls.__context__
    if isinstance(tls, ssl.SSLCertVerificationError):
        return Untrusted(url, f"its certificate does not verify: {tls.verify_message}", passes=False, done=False)
    lasting = ""  # the reason, if waiting cannot help
    if isinstance(error, httpx.InvalidURL):
        lasting = f"this is no URL: {error}"
    elif isinstance(error, httpx.UnsupportedProtocol):
        lasting = "a URL begins with http:// or https://"
    elif tls and tls.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        lasting = "the server does not speak TLS: the URL may have to begin with http://"
    if lasting:
        return Unreachable(url, lasting, passes=False, done=False)
    reason = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http://"):
        reason += "; if it serves HTTPS, the URL begins with https://"
    not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return Unreachable(url, reason, passes=True, done=not not_sent)
