"""The depths of the queue, read once for all who ask."""

from ref_server.http.shared_call import SharedCall
from ref_server.queue.errors import StorageBroken
from ref_server.queue.queue import Queue
from ref_server.queue.records import Stats

# After a read of the depths, the next one waits ten times as long as it took: those who ask get the answer of the last.
_REST = 10.0
_SECONDS = 30.0


class QueueStats:
    def __init__(self, queue: Queue) -> None:
        self._call = SharedCall(queue.stats, rest=_REST)

    async def now(self) -> Stats:
        """Raises StorageBroken where the store does not answer."""
        try:
            return await self._call.result(_SECONDS)
        except TimeoutError:
            raise StorageBroken(f"the store has not answered for {_SECONDS:g} s") from None
