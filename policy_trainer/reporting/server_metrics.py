"""Sends the records of metrics.jsonl to the reference server, where everyone can look at them."""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog

from policy_trainer.reporting.metrics import Metrics, without_nan
from policy_trainer.reporting.samples import SampledGroup
from shared.api import MAX_RECORD_BYTES, MAX_RECORDS
from shared.client import ClientError, RefServerClient, RefServerError

log = structlog.get_logger()

# Records are gathered for so long.
_EVERY_SECONDS = 1.0
_RETRY_SECONDS = 5.0
_REQUEST_SECONDS = 10.0
# At the end of the run the rest is sent for so long.
_CLOSING_SECONDS = 5.0
# Records that wait while the server is away. It keeps as many of a run.
_MOST = 4096
# Of one request: a server takes 1 MiB of JSON.
_REQUEST_BYTES = 512 * 1024
# Of a text in a record of samples, in characters; the run's samples.jsonl has all of it.
_TEXT = 4000
_ANSWERS = 8
_NOT_ALLOWED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class ServerMetrics:
    """A recorder that never waits: a thread sends. While the server is away records wait, and the oldest are dropped.

    client: of its own, without patience; it is closed at the end. after: the step that the run goes on from; -1 if it
    is new. past: what earlier processes have recorded, in case the server lacks some of it.
    """

    def __init__(
        self,
        client: RefServerClient,
        run: str,
        lineage: str,
        *,
        after: int,
        past: Iterable[Mapping[str, Any]],
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._run = run
        self._lineage = lineage
        self._after: int | None = after
        self._note = note
        self._said: set[str] = set()
        self._waiting = deque((dict(record) for record in past), maxlen=_MOST)
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="server-metrics", daemon=True)

    def write(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            dropping = (
                len(self._waiting) == _MOST and self._thread.ident is not None
            )  # before it starts, they are the past
            self._waiting.append(without_nan(record))
            self._changed.notify()
        if not self._thread.ident:
            self._thread.start()
        if dropping and not self._given_up:
            self._say("the reference server has taken no metrics for long: it will lack the oldest ones")

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        """Sends the held-out problems among them."""
        for record in samples_records(groups):
            self.write(record)

    def close(self, *, failed: bool = False) -> None:
        """Sends the rest, for some seconds at most."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(_CLOSING_SECONDS)
        else:
            self._client.close()

    def _work(self) -> None:
        try:
            while records := self._next():
                last = self._closing.is_set()
                seconds = self._send(records)
                if seconds is None or (last and seconds == _RETRY_SECONDS):
                    self._given_up = True
                    return
                self._closing.wait(seconds)
        finally:
            self._client.close()

    def _next(self) -> Sequence[Metrics]:
        """The oldest records, once there are any; none when all are sent and no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            return _first(self._waiting)

    def _send(self, records: Sequence[Metrics]) -> float | None:
        """How long to wait then, in seconds; None: the server takes no metrics."""
        try:
            small = [_without_lists(record) for record in records]
            self._client.report_metrics(
                self._run, small, lineage=self._lineage, after=self._after, read_seconds=_REQUEST_SECONDS
            )
        except RefServerError as error:
            if error.status in _NOT_ALLOWED:
                self._say(f"the reference server keeps no metrics of this run: {error}")
                return None
            if error.status >= 500 or error.status == HTTPStatus.TOO_MANY_REQUESTS:
                return _RETRY_SECONDS
            self._say(f"the reference server refuses metrics, which only metrics.jsonl has then: {error}")
        except ClientError:
            return _RETRY_SECONDS
        except Exception as error:  # a bug: sending the same records again would fail again
            log.exception("metrics could not be sent")
            self._say(f"metrics could not be sent to the reference server; only metrics.jsonl has them: {error!r}")
        else:
            self._after = None
        self._forget(records)
        return _EVERY_SECONDS

    def _forget(self, records: Sequence[Metrics]) -> None:
        """Others may have been dropped meanwhile, these among them."""
        with self._changed:
            for record in records:
                if self._waiting and self._waiting[0] is record:
                    self._waiting.popleft()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)


def settings_record(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Metrics:
    """A run's settings by their dotted names, as the server keeps them."""
    changed = {name: value for name, value in given.items() if value != defaults.get(name)}
    unchanged = {name: value for name, value in given.items() if name not in changed}
    return {"kind": "settings", "step": 0, "changed": changed, "unchanged": unchanged}


def samples_records(groups: Iterable[SampledGroup]) -> list[Metrics]:
    """The held-out problems among these groups with their answers, as the server keeps them.

    It has the texts of training batches already.
    """
    return [_samples_record(group) for group in groups if group.kind == "eval" and group.problem is not None]


def _samples_record(group: SampledGroup, most: int = _TEXT) -> Metrics:
    """most: characters of a text. They are halved until the record is small enough: beyond ASCII one takes 6 bytes."""
    answers = [
        {"text": answer.text[:most], "reward": answer.reward, "tokens": answer.tokens, "finished": answer.finished}
        for answer in group.completions[:_ANSWERS]
    ]
    texts = {"prompt": group.prompt[:most], "answer": (group.answer or "")[:most]}
    record = {"kind": "samples", "step": group.step, "name": str(group.problem), **texts, "completions": answers}
    return record if _size(record) <= MAX_RECORD_BYTES else _samples_record(group, most // 2)


def report_all(client: RefServerClient, run: str, lineage: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Sends the records of a run that has ended. Raises ClientError."""
    left = [without_nan(record) for record in records]
    while left:
        sent = _first(left)
        client.report_metrics(run, [_without_lists(record) for record in sent], lineage=lineage)
        left = left[len(sent) :]


def _first(waiting: Iterable[Metrics]) -> list[Metrics]:
    """As many as one request takes."""
    records: list[Metrics] = []
    size = 0
    for record in waiting:
        size += min(_size(record), MAX_RECORD_BYTES)
        if records and (size > _REQUEST_BYTES or len(records) == MAX_RECORDS):
            break
        records.append(record)
    return records


def _without_lists(record: Metrics) -> Metrics:
    """The record, without its lists where it would be too large: a step of very many batches names them all."""
    if _size(record) <= MAX_RECORD_BYTES:
        return record
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def _size(record: Metrics) -> int:
    return len(json.dumps(record))
