"""What each command of `ref-server queue` can be told."""

from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliToggleFlag

from ref_server.cli.client.options import Command

Id = Annotated[str, Field(min_length=1)]
Choosable = TypeVar("Choosable", bound=str)


class Stats(Command):
    """Batches and MiB by run and state, how much of each limit is used, how long the oldest batch has waited, and the
    throughput of scoring.
    """


class Ls(Command):
    """Lists batches in the order of their admission, the oldest first.

    version is the policy's; tokens are those of the prompt and all completions; age is the time since admission.
    """

    state: Literal["queued", "scoring", "ready", "leased", "done", "expired", "dead"] | None = None
    """Only batches in this state."""
    run: str | None = None
    """Only batches of this run."""
    limit: int = Field(default=50, ge=0)
    """At most so many; 0 for all."""


class Show(Command):
    """One batch: its state, its shape, and its history with times."""

    id: CliPositionalArg[Id]
    """The batch, as `ref-server queue ls` names it."""
    tokens: CliToggleFlag[bool] = False
    """Also its prompt, its completions and their rewards. With --json, every token with its log-probs too."""


class Choice(Command, Generic[Choosable]):
    """Batches by name, or all of a state."""

    ids: CliPositionalArg[list[Id]] = Field(default=[])
    """The batches, as `ref-server queue ls` names them."""
    state: Choosable | None = None
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


class Requeue(Choice[Literal["dead", "expired"]]):
    """Brings dead or expired batches back, their counts of deliveries and of failed scorings at zero.

    A batch that cannot come back, because it was dropped or because the queue is full, is reported; the others go on.
    """


class Purge(Choice[Literal["dead", "expired", "queued", "ready", "leased"]]):
    """Drops the payloads of batches for good. Their ids stay known, as expired, so that none is uploaded twice.

    Asks first, on a terminal. Elsewhere it wants --yes.
    """

    older_than_days: float | None = Field(default=None, ge=0)
    """With --state: only those that were admitted so many days ago or earlier."""
    yes: CliToggleFlag[bool] = False
    """Do not ask."""

    @model_validator(mode="after")
    def _age_of_a_state(self) -> Self:
        if self.older_than_days is not None and self.state is None:
            raise ValueError("--older-than-days goes with --state")
        return self
