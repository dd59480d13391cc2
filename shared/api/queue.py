"""The whole queue: its depths, its limits, and the scorer's throughput."""

import sys

from pydantic import ConfigDict, Field

from shared.api.base import Answer
from shared.api.states import State


class Depth(Answer):
    batches: int
    bytes: int


class ScoringView(Answer):
    """What was scored since the server started."""

    model_config = ConfigDict(extra="allow")

    batches: int
    tokens: int
    """Of queued batches, prompts included."""
    direct_tokens: int = 0
    """Of direct requests (`/v1/logprobs`)."""
    errors: int
    splits: int = 0
    """Forwards that ran out of memory and were done in parts."""
    working_seconds: float
    waiting_seconds: float
    tokens_per_second: float


# max_batches and max_bytes bound what waits: queued, scoring and ready batches, and leased ones whose training has not
# started. max_in_flight bounds leased batches that are not settled, whether their training has started or not. A run
# may use at most as much of each as is free. The limits per run are what it may use while it is alone. max_stored_bytes
# bounds the payloads of batches in any state: those of settled ones go when others need the room.
class LimitsView(Answer):
    max_batches: int
    max_batches_per_run: int
    max_bytes: int
    max_bytes_per_run: int
    max_in_flight: int
    max_in_flight_per_run: int
    max_stored_bytes: int = sys.maxsize
    """Older servers have no such limit."""
    keep_samples: int = 0
    """Trained batches of a run whose payloads are kept, to be looked at; older servers keep none."""
    max_deliveries: int
    max_scoring_attempts: int


class QueueView(Answer):
    model_config = ConfigDict(extra="allow")

    states: dict[State, Depth]
    runs: dict[str, dict[State, Depth]]
    """By run; states without batches are left out. At most a thousand runs, in the order of their names."""
    next_cursor: str | None = None
    """Pass it as `cursor` to get the next runs; null on the last page. Each page has the totals of all runs."""
    stored_bytes: int = 0
    """Payloads of these states together; `limits.max_stored_bytes` bounds those of the whole queue."""
    oldest_age_seconds: float | None
    """How long the oldest waiting batch has waited; null when none waits."""
    scoring: ScoringView
    limits: LimitsView
    since_start: dict[str, int] = Field(default={})
    """Event counts of the answering server since it started; several servers may share a queue."""
