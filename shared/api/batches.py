"""Batches: their admission, their states and histories, their tokens and rewards to be looked at, and dropping many."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shared.api.base import Answer, Name, Request, example
from shared.api.states import State

# Regular expression of a cursor: the place of a batch in the order of admission, in hexadecimal.
CURSOR = "^[0-9a-f]{1,15}$"
# The states whose batches can be purged: a batch that is being scored or done is not dropped.
PurgeableState = Literal["dead", "expired", "queued", "ready", "leased"]


class Admitted(Answer):
    id: str
    state: State


class Uploaded(Admitted):
    created: bool
    """False when the same batch was uploaded before."""


class BatchSummary(Answer):
    """A batch without its payload."""

    id: str
    run: str
    lineage: str = ""
    """Which training of the run's name sampled it; empty for clients that name none."""
    epoch: int
    policy_version: int
    state: State
    reason: str | None
    """Why it expired or died."""
    admitted_at: float
    """Unix seconds."""
    prompt_tokens: int
    completion_tokens: int
    """Of all completions together."""
    completions: int
    payload_bytes: int
    """0 once the payload is gone."""
    deliveries: int
    """Leases that were lost after training on the batch had begun, or released with an error."""
    scoring_attempts: int
    """Failed attempts at scoring."""
    consumer: str | None


class Event(Answer):
    """One entry of a batch's history. at: Unix seconds."""

    at: float
    state: State
    detail: str


class BatchDetails(BatchSummary):
    history: list[Event]


class BatchPage(Answer):
    batches: list[BatchSummary]
    next_cursor: str | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class PurgeBody(Request):
    """Chooses all batches in a state whose payload is still there."""

    model_config = example(state="dead", run="curl")

    state: PurgeableState
    run: Name | None = None
    """Only those of this run."""
    admitted_until: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] | None = None
    """Only those with `admitted_at` up to here, in Unix seconds."""
    cursor: Annotated[str, Field(pattern=CURSOR)] | None = None
    """`next_cursor` of the previous answer, to go on."""


class Purged(Answer):
    dropped: list[str]
    """The ids of the batches that this request dropped."""
    bytes: int
    """Of their payloads."""
    next_cursor: str | None
    """Pass it as `cursor` to drop the next ones; null when all were looked at."""


class PromptView(Answer):
    text: str | None
    """null where the server has no tokenizer."""
    ids: list[int]


class RowView(Answer):
    """One completion. Rewards are null where it could not be judged, the others where the batch has none."""

    text: str | None
    ids: list[int]
    tokens: list[str | None]
    """Each id's text alone; bytes that are no whole character as `\\xe2`. null where the server has no tokenizer."""
    loss_mask: list[bool] | None = None
    """False for tokens that are not trained on; null: all are."""
    sampler_logps: list[float] | None = None
    ref_logps: list[float] | None = None
    teacher_logps: list[float] | None = None
    logps: list[float] | None = None
    """Of the policy after the step that trained on the batch; null before training, and where the trainer told none."""
    advantages: list[float] | None = None
    """Those it trained with, 0 where it did not; null as `logps`."""
    reward: float | None
    rewards: dict[str, float | None]
    step_ends: list[int] | None = None
    """Process supervision: the place of each step's last token; null without it."""
    step_rewards: list[float | None] | None = None
    finished: bool


class TokensView(Answer):
    """A batch, token by token. Its log-probs are those of its temperature."""

    id: str
    run: str = ""
    task: str | None = None
    sample: Any = None
    """What the worker said of it, as JSON; null if it said nothing."""
    temperature: float = 1.0
    policy_version: int = 0
    """Of the weights that sampled it."""
    trained_step: int | None = None
    """The training step that `logps` and `advantages` are of."""
    prompt: PromptView
    rows: list[RowView]


class RewardsView(Answer):
    """The rewards of a batch's completions, null where one could not be judged."""

    id: str
    rewards: list[float | None]
    parts: dict[str, list[float | None]]
    """Each reward that the totals were made of."""
    lengths: list[int]
    """Tokens."""
    finished: list[bool]
