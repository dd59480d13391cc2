"""Batches and the queue that holds them: states, histories, tokens and rewards for display, depths and limits."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from shared.api.base import ErrorDetail, Name, RequestRecord, ResponseRecord, example

# The run of all batches of the Simple-GRPO byte protocol: only that protocol uploads and takes them.
LEGACY_RUN = "legacy"
# An upload of several batches has at most so many, and so many bytes: it is for small ones.
MAX_UPLOADS = 64
MAX_UPLOADS_BYTES = 4 * 2**20
# Regular expression of a cursor: the place of a batch in the order of admission, in hexadecimal.
CURSOR = "^[0-9a-f]{1,15}$"
# The states whose batches can be purged: a batch that is being scored or done is not dropped.
PurgeableState = Literal["dead", "expired", "queued", "ready", "leased"]


class State(StrEnum):
    QUEUED = "queued"
    SCORING = "scoring"
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    EXPIRED = "expired"
    DEAD = "dead"


class ListOrder(StrEnum):
    """Which batch is listed first, by admission."""

    OLDEST = "oldest"
    NEWEST = "newest"


class Admitted(ResponseRecord):
    id: str
    state: State


class Uploaded(Admitted):
    created: bool
    """False when the same batch was uploaded before."""


class UploadResult(ResponseRecord):
    """Of one batch among several: either of the two."""

    uploaded: Uploaded | None = None
    error: ErrorDetail | None = None


class UploadResults(ResponseRecord):
    """In the order of the batches."""

    results: list[UploadResult]


class BatchSummary(ResponseRecord):
    """A batch without its payload."""

    id: str
    run: str
    lineage: str = ""
    """The lineage that sampled it; empty for clients without one."""
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


class Event(ResponseRecord):
    """One entry of a batch's history. at: Unix seconds."""

    at: float
    state: State
    detail: str


class BatchDetails(BatchSummary):
    history: list[Event]


class BatchPage(ResponseRecord):
    batches: list[BatchSummary]
    next_cursor: str | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class PurgeBody(RequestRecord):
    """Chooses all batches in a state whose payload is still there."""

    model_config = example(state="dead", run="curl")

    state: PurgeableState
    run: Name | None = None
    """Only those of this run."""
    admitted_until: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] | None = None
    """Only those with `admitted_at` up to here, in Unix seconds."""
    cursor: Annotated[str, Field(pattern=CURSOR)] | None = None
    """`next_cursor` of the previous answer, to continue."""


class Purged(ResponseRecord):
    dropped: list[str]
    """The ids of the batches that this request dropped."""
    bytes: int
    """Of their payloads."""
    next_cursor: str | None
    """Pass it as `cursor` to drop the next ones; null when all were looked at."""


class PromptView(ResponseRecord):
    text: str | None
    """null if the server has no tokenizer."""
    ids: list[int]


class RowView(ResponseRecord):
    """One completion. Rewards are null where it could not be judged, the others where the batch has none."""

    text: str | None
    ids: list[int]
    tokens: list[str | None]
    """The text of each id; bytes that are not a whole character as `\\xe2`. null if the server has no tokenizer."""
    loss_mask: list[bool] | None = None
    """False for tokens that are not trained on; null: all are."""
    sampler_logps: list[float] | None = None
    ref_logps: list[float] | None = None
    teacher_logps: list[float] | None = None
    logps: list[float] | None = None
    """Of the policy after the step that trained on the batch; null before training, or if the trainer reported none."""
    advantages: list[float] | None = None
    """Those it trained with, 0 for tokens it did not train on; null like `logps`."""
    reward: float | None
    rewards: dict[str, float | None]
    step_ends: list[int] | None = None
    """Process supervision: the index of each step's last token; null without it."""
    step_rewards: list[float | None] | None = None
    finished: bool


class TokensView(ResponseRecord):
    """A batch, token by token. Its log-probs are those of its temperature."""

    id: str
    run: str = ""
    task: str | None = None
    sample: Any = None
    """The worker's description of it, any JSON; null if there is none."""
    temperature: float = 1.0
    policy_version: int = 0
    """Of the weights that sampled it."""
    trained_step: int | None = None
    """The training step that `logps` and `advantages` are of."""
    prompt: PromptView
    images: int = 0
    """How many pictures of the prompt can be shown: `GET /v1/batches/{id}/images/{number}`, counted from 0."""
    rows: list[RowView]


class RewardsView(ResponseRecord):
    """The rewards of a batch's completions, null where one could not be judged, and its problem, for display."""

    id: str
    prompt: str | None = None
    """On one line of at most 200 characters: the last message of the user in the batch's `sample`, else the end of the
    decoded prompt. null if the server has no tokenizer either."""
    answer: str | None = None
    """The gold answer in the batch's `sample`, shortened like `prompt`; null if there is none."""
    rewards: list[float | None]
    parts: dict[str, list[float | None]]
    """Each reward that the totals were made of."""
    lengths: list[int]
    """Tokens."""
    finished: list[bool]


class Depth(ResponseRecord):
    batches: int
    bytes: int


class ScoringView(ResponseRecord):
    """What was scored since the server started."""

    model_config = ConfigDict(extra="allow")

    batches: int
    tokens: int
    """Of queued batches, prompts included."""
    direct_tokens: int
    """Of direct requests (`/v1/logprobs`)."""
    errors: int
    splits: int
    """Forwards that ran out of memory and were done in parts."""
    working_seconds: float
    waiting_seconds: float
    tokens_per_second: float


class ThroughputView(ResponseRecord):
    """How fast the answering server worked, since its start at most. Columns: entry i of each list is the mean rate per
    second up to `times[i]`, since the entry before."""

    times: list[float]
    """Unix seconds, ascending: every 10 seconds, or every 4 minutes of more than an hour."""
    tokens: list[float]
    """Tokens scored, prompts included."""
    uploaded: list[float]
    """Batches admitted."""
    taken: list[float]
    """Batches leased for the first time."""
    working: list[float]
    """Seconds that scoring loops scored: how many of them did on average."""
    waiting: list[float]
    """Seconds that scoring loops waited for batches."""


# max_batches and max_bytes bound what waits: queued, scoring and ready batches, and leased ones whose training has not
# started. max_in_flight bounds leased batches that are not settled, whether their training has started or not. A run
# may use at most as much of each as is free. The limits per run apply while it is the only run. max_stored_bytes
# bounds the payloads of batches in any state: settled batches lose theirs when others need the room.
class LimitsView(ResponseRecord):
    max_batches: int
    max_batches_per_run: int
    max_bytes: int
    max_bytes_per_run: int
    max_in_flight: int
    max_in_flight_per_run: int
    max_stored_bytes: int
    keep_samples: int
    """How many trained batches of a run keep their payloads, for display."""
    max_deliveries: int
    max_scoring_attempts: int


class QueueView(ResponseRecord):
    model_config = ConfigDict(extra="allow")

    states: dict[State, Depth]
    runs: dict[str, dict[State, Depth]]
    """By run; states without batches are left out. At most a thousand runs, in the order of their names."""
    next_cursor: str | None = None
    """Pass it as `cursor` to get the next runs; null on the last page. Each page has the totals of all runs."""
    stored_bytes: int
    """Payloads of these states together; `limits.max_stored_bytes` bounds those of the whole queue."""
    oldest_age_seconds: float | None
    """How long the oldest waiting batch has waited; null when none waits."""
    scoring: ScoringView
    limits: LimitsView
    since_start: dict[str, int]
    """Event counts of the answering server since it started; several servers may share a queue."""
