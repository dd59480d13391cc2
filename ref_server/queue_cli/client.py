"""The operator's side of the HTTP API: each request once, since a person waits for the answer."""

from typing import Any
from urllib.parse import quote

import httpx

# What the server lists in one answer.
PAGE = 1000

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0


class QueueError(Exception):
    """There is no good answer. The message says why."""


class ServerSilent(QueueError):
    """Nothing answers at the URL, or no reference server does: asking further is in vain."""


class ServerRefused(QueueError):
    """The server answered with an error, which speaks of one request only."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class QueueClient:
    """A connection to one running reference server. Raises ServerSilent, ServerRefused."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS))
        except httpx.InvalidURL as error:
            raise ServerSilent(f"{url} is no URL: {error}") from None

    def __enter__(self) -> "QueueClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def stats(self) -> dict[str, Any]:
        """What `GET /v1/queue` tells."""
        return self._json(self._request("GET", "/v1/queue"))

    def page(self, state: str | None, run: str | None, limit: int | None) -> dict[str, Any]:
        """The oldest `limit` batches, or all, as one long page: `batches`, and `next_cursor` when there are more."""
        batches: list[dict[str, Any]] = []
        asked: dict[str, Any] = {name: value for name, value in {"state": state, "run": run}.items() if value}
        while True:
            asked["limit"] = PAGE if limit is None else min(limit - len(batches), PAGE)
            answer = self._json(self._request("GET", "/v1/batches", params=asked))
            batches += answer["batches"]
            asked["cursor"] = answer["next_cursor"]
            if asked["cursor"] is None or len(batches) == limit:
                return {"batches": batches, "next_cursor": asked["cursor"]}

    def batch(self, id: str) -> dict[str, Any]:
        """State, shape and history of one batch."""
        return self._json(self._request("GET", f"/v1/batches/{quote(id, safe='')}"))

    def tokens(self, id: str) -> dict[str, Any]:
        """Texts, tokens, log-probs and rewards of one batch."""
        return self._json(self._request("GET", f"/v1/batches/{quote(id, safe='')}/tokens"))

    def requeue(self, id: str) -> dict[str, Any]:
        """Brings a batch back: its id and new state."""
        return self._json(self._request("POST", f"/v1/batches/{quote(id, safe='')}/requeue"))

    def drop(self, id: str) -> str:
        """Drops the payload of a batch: its id."""
        self._request("DELETE", f"/v1/batches/{quote(id, safe='')}")
        return id

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **content)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerSilent(f"no server answers at {self._url} ({error})") from None
        if not response.is_success:
            raise ServerRefused(response.status_code, _message(response))
        return response

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            return response.json()
        except ValueError:
            raise ServerSilent(f"what answers at {self._url} is no reference server") from None


def _message(response: httpx.Response) -> str:
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the answer was {response.status_code} {response.reason_phrase}"
