"""Rows whose log-probs the client fetches with a request of its own: what tinker calls futures."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog
from starlette.concurrency import run_in_threadpool

from ref_server.access.shares import Shares
from ref_server.scoring.reference import Busy, NotReady, TooLarge
from ref_server.scoring.shared_prefixes import MOST_ROWS, Row, SharedPrefixes
from ref_server.service.service import Service
from shared.batch import BatchError, TokenGroup

log = structlog.get_logger()

# Rows that arrive within this time share what they begin with: a client sends the completions of a group one by one.
_TOGETHER_SECONDS = 0.02
# Sets of rows at once: one that is scored, and one that is ready to follow.
_MOST_SETS = 2
_BUSY_SECONDS = 0.1
# A result is kept for this long, and for the shorter time once it was fetched: that response may have been lost.
_KEPT_SECONDS = 600.0
_FETCHED_SECONDS = 60.0
# All that waits or is kept, and what each row takes for itself and for each token: an id in a list, and a log-prob.
_MOST_BYTES = 64 * 2**20
_ROW_BYTES = 1024
_TOKEN_BYTES = 48

Result = np.ndarray | Exception


@dataclass(frozen=True, eq=False)
class _Pending:
    """holder: who is charged for it. result: float32 (length,) log-probs of the row's tokens, NaN before index `first`,
    or why there are none."""

    holder: str
    row: Row
    result: "asyncio.Future[Result]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def bytes(self) -> int:
        return _ROW_BYTES + _TOKEN_BYTES * len(self.row.ids)


class LogprobFutures:
    """Used on the event loop. A request is known by its holder and its id."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._room = Shares(_MOST_BYTES)
        self._known: dict[tuple[str, str], _Pending] = {}
        self._waiting: deque[_Pending] = deque()
        self._sets: set[asyncio.Task[None]] = set()

    def submit(self, holder: str, id: str, row: Row) -> None:
        """A known id is a request that was sent again. Raises Busy."""
        if (holder, id) in self._known:
            return
        pending = _Pending(holder, row)
        if not self._room.take(holder, pending.bytes):
            raise Busy("your log-probs would fill more of the memory for them than is free; fetch those before")
        self._known[holder, id] = pending
        pending.result.add_done_callback(lambda _: self._forget_after(_KEPT_SECONDS, id, pending))
        self._waiting.append(pending)
        asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self._score_waiting)

    async def result(self, holder: str, id: str, seconds: float) -> Result:
        """Raises KeyError for an id that is not known, or no longer; TimeoutError after so many seconds."""
        pending = self._known[holder, id]
        result = await asyncio.wait_for(asyncio.shield(pending.result), seconds)
        self._forget_after(_FETCHED_SECONDS, id, pending)
        return result

    def _forget_after(self, seconds: float, id: str, pending: _Pending) -> None:
        def forget() -> None:
            if self._known.get((pending.holder, id)) is pending:
                del self._known[pending.holder, id]
                self._room.give(pending.holder, pending.bytes)

        asyncio.get_running_loop().call_later(seconds, forget)

    def _score_waiting(self) -> None:
        while self._waiting and len(self._sets) < _MOST_SETS:
            task = asyncio.create_task(self._score(self._take()))
            self._sets.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._sets.discard(task)
        self._score_waiting()

    def _take(self) -> list[_Pending]:
        """As many as fit max_batch_tokens and are compared with each other, at least one."""
        taken = [self._waiting.popleft()]
        tokens = len(taken[0].row.ids)
        while self._waiting and len(taken) < MOST_ROWS:
            tokens += len(self._waiting[0].row.ids)
            if tokens > self._service.config.max_batch_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _score(self, taken: Sequence[_Pending]) -> None:
        results: Sequence[Result]
        try:
            rows = await run_in_threadpool(SharedPrefixes, [pending.row for pending in taken])
            logps = rows.by_row(await asyncio.gather(*map(self._logps, rows.groups)))
            results = [_of_all_tokens(*each) for each in zip((pending.row for pending in taken), logps, strict=True)]
        except Exception as error:
            if len(taken) > 1:  # one row may be the cause: the others have a result
                for pending in taken:
                    await self._score([pending])
                return
            if not isinstance(error, BatchError | TooLarge | NotReady):
                log.error("log-probs of a prompt could not be computed", exc_info=True)
            results = [error]
        for pending, result in zip(taken, results, strict=True):
            pending.result.set_result(result)

    async def _logps(self, group: TokenGroup) -> np.ndarray:
        while True:
            try:
                scored = self._service.scoring.submit([group], 1.0)
            except Busy:
                await asyncio.sleep(_BUSY_SECONDS)
            else:
                return (await asyncio.wrap_future(scored)).logps[0]


def _of_all_tokens(row: Row, logps: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(row.first, np.nan, np.float32), logps[row.first - 1 :]])
