"""Who sends a request, for routes that keep a token of a single run to that run, and what the log says of it."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import Depends, Request

from ref_server.access.keys import Holder
from ref_server.queue.queue import Queue


async def _asker(request: Request) -> Holder:
    return request.state.asker  # the guard has set it


Asker = Annotated[Holder, Depends(_asker)]


def confine(asker: Holder, queue: Queue, ids: Iterable[str]) -> None:
    """Raises Denied if a batch is of another run than the asker's only one. Unknown ids are of no run."""
    if asker.run is not None:
        for run in queue.runs_of(list(ids)):
            asker.only(run)


def note(request: Request, **about: str | int | None) -> None:
    """Adds to the request's line in the log. Give checked values only."""
    request.state.about = about
