"""A running batch on a vLLM server: a request for each row, sent by a thread while the caller does other work."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.vllm_client import Unavailable, VllmClient, connected, wait_to_retry
from policy_trainer.rollout.sampling.vllm_requests import RowOptions
from shared.client.retry import OnWait

T = TypeVar("T")

# How long `advance` waits for an answer.
_WAIT_SECONDS = 0.05


@dataclass(frozen=True, eq=False)
class Request:
    """Rows with the same prompt, and the options of each."""

    prompt: EncodedPrompt
    options: Mapping[int, Mapping[str, Any]]


# Sends a request's rows, and calls the function with each as it ends. Raises Unavailable for what can be repeated.
Complete = Callable[[VllmClient, Request, Callable[[int, Completion], None]], Coroutine[Any, Any, None]]


class ServerRunningBatch:
    """If a request fails because the server is unavailable, all rows that have not ended are repeated."""

    def __init__(self, url: str, complete: Complete, options: RowOptions, on_wait: OnWait) -> None:
        self._url = url
        self._complete = complete
        self._options = options
        self._on_wait = on_wait
        self._thread = RequestThread(url)
        self._running: dict[int, Request] = {}
        self._answers: SimpleQueue[tuple[int, Completion] | Exception] = SimpleQueue()
        self._failing_since: float | None = None

    def __len__(self) -> int:
        return len(self._running)

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        request = Request(prompt, {row: self._options.of(row, max_tokens) for row in rows})
        self._running |= dict.fromkeys(rows, request)
        self._send(request)

    def advance(self) -> list[tuple[int, Completion]]:
        """Waits up to _WAIT_SECONDS for an answer. Raises WeightsLost and UserError."""
        if not self._running:
            return []
        answers = self._arrived(_WAIT_SECONDS)
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failure is not None:
            self._thread.close()  # on_wait may give the device away: nothing may be under way
            answers += self._arrived(0)
        ended = [answer for answer in answers if not isinstance(answer, Exception)]
        for row, _ in ended:
            del self._running[row]
        if failure is not None:
            self._retry(failure)
        elif ended:
            self._failing_since = None
        return ended

    def close(self) -> None:
        """Cancels what is under way; the server aborts requests whose connection is closed."""
        self._thread.close()

    def _arrived(self, seconds: float) -> list[tuple[int, Completion] | Exception]:
        """What has been answered. Waits so long if there is nothing."""
        answers = []
        try:
            answers.append(self._answers.get(timeout=seconds) if seconds else self._answers.get_nowait())
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers

    def _send(self, request: Request) -> None:
        async def work(client: VllmClient) -> None:
            try:
                await self._complete(client, request, lambda row, completion: self._answers.put((row, completion)))
            except Exception as error:  # `advance` raises it
                self._answers.put(error)

        self._thread.send(work)

    def _retry(self, failure: Exception) -> None:
        if not isinstance(failure, Unavailable):
            raise failure
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        wait_to_retry(self._url, failure, self._failing_since, self._on_wait)
        self._thread = RequestThread(self._url)
        for request in {id(request): request for request in self._running.values()}.values():
            left = {row: options for row, options in request.options.items() if self._running.get(row) is request}
            self._send(Request(request.prompt, left))


class RequestThread:
    """A thread with an event loop, and a client in it."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm requests", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._client = self._result(self._stack.enter_async_context(connected(url)))

    def send(self, work: Callable[[VllmClient], Coroutine[Any, Any, None]]) -> None:
        """Starts the work, which must not raise."""
        asyncio.run_coroutine_threadsafe(work(self._client), self._loop)

    def close(self) -> None:
        """Cancels what is under way, and waits until it has ended. Harmless when called again."""
        if self._loop.is_closed():
            return
        self._result(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()
