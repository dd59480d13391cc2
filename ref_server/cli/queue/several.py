"""What `requeue` and `purge` share: batches by name or by state, and one operation on each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.progress import track

from ref_server.cli.connection import ClientOptions
from ref_server.cli.queue.ls import list_pages
from ref_server.cli.terminal import print_error
from shared.api import BatchSummary, ListOrder
from shared.client import ClientError, RefServerClient, RefServerError

# At most this many refusals are printed one by one.
_PRINTED_FAILURES = 20

Id = Annotated[str, Field(min_length=1)]
StateName = TypeVar("StateName", bound=str)


class SeveralOptions(ClientOptions, Generic[StateName]):
    """Batches by name, or all of a state."""

    ids: CliPositionalArg[list[Id]] = Field(default=[])
    """The batches, as `ref-server queue ls` names them."""
    state: StateName | None = None
    """Instead of naming batches: all in this state whose payload is still there."""
    run: str | None = None
    """With --state: only those of this run."""

    @model_validator(mode="after")
    def _names_or_a_state(self) -> Self:
        if bool(self.ids) == (self.state is not None):
            raise ValueError("name batches, or choose them by --state; one of the two")
        if self.run is not None and self.state is None:
            raise ValueError("--run goes with --state")
        return self


@dataclass
class Outcomes:
    """Results of an operation on many batches: what it returned, and what the server refused."""

    done: list[Any] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    def print_failures(self) -> None:
        for failure in self.failed[:_PRINTED_FAILURES]:
            print_error(f"{failure['id']}: {failure['message']}")
        if len(self.failed) > _PRINTED_FAILURES:
            print_error(f"and {len(self.failed) - _PRINTED_FAILURES} more; --json lists all")


def batches_of_state(client: RefServerClient, options: SeveralOptions) -> Iterator[BatchSummary]:
    """Batches of the state that still have a payload: a dropped batch cannot be brought back or dropped again."""
    for page in list_pages(client, options.state, options.run, None, ListOrder.OLDEST):
        yield from (batch for batch in page.batches if batch.payload_bytes)


def for_each(done: str, ids: Iterable[str], act: Callable[[str], Any]) -> Outcomes:
    """Calls `act` once for each batch. It notes what the server refuses and goes on.

    done: what is done to them, for messages: `purged`.
    """
    names = list(dict.fromkeys(ids))
    outcomes = Outcomes()
    console = Console(stderr=True)
    quiet = not console.is_terminal or len(names) < 10
    try:
        for id in track(names, description=done, console=console, transient=True, disable=quiet):
            try:
                outcomes.done.append(act(id))
            except RefServerError as error:
                outcomes.failed.append({"id": id, "status": error.status, "message": error.message})
    except (ClientError, KeyboardInterrupt):
        print_error(how_far(len(outcomes.done), len(names), done))
        raise
    return outcomes


def how_far(count: int, total: int, done: str) -> str:
    return f"{count} of {total} were {done} before this ended"


def count_batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
