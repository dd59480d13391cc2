"""Rewards over HTTP: a server of the user's judges samples, JSON in and out.

A POST has `{"samples": [{"completion": …, "answer": …, …}, …]}`, each with the arguments of a user's function for one
completion. The answer is `{"rewards": [1.0, null, …]}`, one for each sample; null could not be judged.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from http import HTTPStatus

import httpx
from pydantic_core import to_jsonable_python

from policy_trainer.config import HttpRewardConfig
from policy_trainer.data.problem import Sample, Score
from policy_trainer.processes.lifecycle.timing import logged_wait
from policy_trainer.rewards.failures import Failures
from policy_trainer.rewards.functions import arguments, checked
from shared.batch import MAX_NAME_CHARACTERS
from shared.client.credentials import check_token
from shared.client.errors import retry_after, unreachable
from shared.client.proxies import connection_options
from shared.client.retry import retried
from shared.errors import UserError

# The environment variable with the bearer token of the servers. No setting: a run writes its settings to files.
TOKEN_VARIABLE = "TANDEM_REWARDS_TOKEN"
SCHEMES = ("http://", "https://")

_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE = 10.0
# A list of rewards is far shorter; a longer answer must not fill the memory.
_MAX_ANSWER_BYTES = 16 * 2**20
_MAX_EXCERPT = 300
_NULL = {"error": "the server answered null for it", "kind": "null"}


class NotJudging(Exception):
    """The server does not answer, or not now. retry_after: in seconds, None if it asks for none."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class HttpReward:
    """Judges samples by a server. While the server is down the judging waits, and no sample is lost."""

    def __init__(self, url: str, config: HttpRewardConfig) -> None:
        """Raises UserError for an invalid URL, or an invalid token in the environment, and UnusableProxy."""
        self._url = _checked_url(url)
        self._config = config
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **_authorization()}
        self._options = connection_options(url)  # slow to create
        self.failures = Failures([url])
        self._wait = logged_wait()

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample; NaN for null. Raises UserError for a server that refuses a request, answers
        something else than rewards, or is not there for longer than `patience`."""
        size, scores = self._config.batch_size, []
        if samples:
            with self._connect() as http:
                for start in range(0, len(samples), size):
                    scores += self._judge(http, samples[start : start + size])
        return scores

    def _connect(self) -> httpx.Client:
        timeout = httpx.Timeout(self._config.seconds, connect=min(self._config.seconds, _CONNECT_SECONDS))
        return httpx.Client(headers=self._headers, timeout=timeout, **self._options)

    def _judge(self, http: httpx.Client, samples: Sequence[Sample]) -> list[Score]:
        body = _encode(samples)
        try:
            answer = retried(
                lambda: self._ask(http, body),
                self._reason_to_wait,
                self._wait,
                patience=self._config.patience,
                longest=_LONGEST_PAUSE,
            )
        except NotJudging as error:
            raise UserError(
                f"rewards: {self._url} has not judged for judging.http.patience = {self._config.patience:g} s: {error}"
            ) from None
        rewards = [math.nan if reward is None else reward for reward in self._read(answer, len(samples))]
        return self.failures.scores(
            self._url, [_NULL if math.isnan(reward) else {"score": reward} for reward in rewards]
        )

    def _ask(self, http: httpx.Client, body: bytes) -> bytes:
        """The body of a good answer. Raises NotJudging where asking again may help."""
        deadline = time.monotonic() + self._config.seconds
        late = f"it took more than judging.http.seconds = {self._config.seconds:g}"
        answer = bytearray()
        try:
            with http.stream("POST", self._url, content=body) as response:
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise self._refusal(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise NotJudging(late)
        except httpx.ReadTimeout:
            raise NotJudging(late) from None
        except httpx.TransportError as error:
            failure = unreachable(error, self._url)
            raise NotJudging(failure.reason) if failure.passes else UserError(f"rewards: {failure}") from None
        self._check_status(response, bytes(answer))
        has_length = {"content-length", "transfer-encoding"} & set(response.headers)
        if not has_length and not answer.rstrip().endswith(b"}"):  # only the connection's end shows the answer's
            raise NotJudging("its answer broke off")
        return bytes(answer)

    def _check_status(self, response: httpx.Response, answer: bytes) -> None:
        """Raises NotJudging for a server that is overloaded or has failed, UserError for one that refuses."""
        message = f"{response.status_code} {response.reason_phrase}: {_excerpt(answer)}".rstrip(": ")
        if response.is_server_error or response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            raise NotJudging(message, retry_after(response))
        if response.is_redirect:
            message += (
                f" to {response.headers.get('Location', '')}; redirects are not followed: name that URL in rewards"
            )
        if not response.is_success:
            raise self._refusal(message)

    def _read(self, answer: bytes, count: int) -> list[Score]:
        """The rewards of `count` samples. Raises UserError where the answer has none."""
        try:
            rewards = json.loads(answer)["rewards"]
            if not isinstance(rewards, list):
                raise TypeError
        except (ValueError, RecursionError, LookupError, TypeError):
            raise self._refusal(f'{_excerpt(answer)!r} instead of {{"rewards": […]}}') from None
        if len(rewards) != count:
            raise self._refusal(f"{len(rewards)} rewards for {count} samples")
        try:
            return [checked(reward) for reward in rewards]
        except (ValueError, OverflowError) as error:
            raise self._refusal(f"a list of rewards with a wrong one: {error}") from None

    def _reason_to_wait(self, error: Exception) -> str | None:
        return f"the reward server at {self._url} does not judge: {error}" if isinstance(error, NotJudging) else None

    def _refusal(self, message: str) -> UserError:
        return UserError(f"rewards: {self._url} answered {message}")


def _encode(samples: Sequence[Sample]) -> bytes:
    """JSON. In columns of the data, dates become texts in ISO form, bytes URL-safe base64, NaN null."""
    rows = [arguments(sample) for sample in samples]
    return json.dumps({"samples": to_jsonable_python(rows, bytes_mode="base64", inf_nan_mode="null")}).encode()


def _excerpt(answer: bytes) -> str:
    """The beginning of a text, on one line."""
    return " ".join(answer[: 4 * _MAX_EXCERPT].decode(errors="replace").split())[:_MAX_EXCERPT]


def _checked_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UserError(f"rewards: {text!r} is no URL: {error}") from None
    if not url.host:
        raise UserError(f"rewards: {text!r} names no host", "give http://HOST:PORT/PATH")
    if url.userinfo:  # the name of a reward stands in logs and metrics
        raise UserError(f"rewards: the URL of {url.host} has a name or password", f"give a token in {TOKEN_VARIABLE}")
    if len(text) > MAX_NAME_CHARACTERS:
        raise UserError(f"rewards: a name has at most {MAX_NAME_CHARACTERS} characters, the URL of {url.host} more")
    return text


def _authorization() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        return {}
    try:
        check_token(token)
    except ValueError as error:
        raise UserError(f"{TOKEN_VARIABLE}: {error}") from None
    return {"Authorization": f"Bearer {token}"}
