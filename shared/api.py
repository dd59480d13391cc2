"""The JSON of the HTTP API: what the server takes and answers, what a client sends and reads, and what OpenAPI shows.

Batches themselves travel as safetensors (`wire.py`).
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.states import LEGACY_RUN, Order, Outcome, State

Name = Annotated[str, Field(min_length=1, max_length=200)]
# strict, here and below: false is no number, and 0 is not false.
Seconds = Annotated[float, Field(gt=0, le=86_400, strict=True)]
Version = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
# fail_fast, here and below: the first fault is told, and describing a million of them would take the server a minute.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Rows = Annotated[list[TokenIds], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]

_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


class Request(BaseModel):
    """What a client sends: keys that mean nothing are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Answer(BaseModel):
    """What the server answers: a client of today reads a server of tomorrow, which may say more."""

    model_config = ConfigDict(frozen=True, from_attributes=True, use_attribute_docstrings=True)


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


# Scoring


class LogprobsRequest(Request):
    """Either token ids (`prompt_ids` and lists of ids) or texts (`prompt` and strings)."""

    model_config = _example(prompt="2+3=", completions=["5", "6"], temperature=1.0)

    prompt_ids: TokenIds | None = None
    prompt: str | None = None
    completions: _Rows | _Texts = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False, strict=True)
    """What the logits are divided by."""

    @model_validator(mode="after")
    def _one_form(self) -> "LogprobsRequest":
        texts = isinstance(self.completions[0], str)
        if (self.prompt is None) == (self.prompt_ids is None) or texts != (self.prompt is not None):
            raise ValueError("give prompt_ids with completions of ids, or prompt with completions of text")
        return self


class Logprobs(Answer):
    """One row for each completion, one log-prob and one text for each of its tokens."""

    logprobs: list[list[float]]
    tokens: list[list[str]]
    reference_version: int


class ModelInfo(Answer):
    """What a client must know of the reference model. All null but the limits when there is none."""

    name: str | None
    revision: str | None
    vocabulary_size: int | None
    """Rows of the embedding: every token id lies below."""
    context_length: int | None
    """Tokens of a prompt and one completion together; null for a model without such a bound."""
    dtype: str | None
    device: str | None
    reference_version: int | None
    max_batch_tokens: int
    """Tokens of a batch: the prompt once and all completions."""
    tokenizer_fingerprint: str | None
    forward: str | None
    """How log-probs are computed: `packed`, or one row after the other."""
    snapshot: str | None = None
    """What has replaced the model's weights since the server started; null where nothing has."""


class ReferenceBody(Request):
    """A snapshot below the server's `--snapshot-root`, and the version that batches scored with it carry."""

    model_config = _example(snapshot="step-200", version=1)

    snapshot: Name
    version: Version


class ReferenceVersion(Answer):
    reference_version: int


# Batches


class Admitted(Answer):
    id: str
    state: State


class BatchSummary(Answer):
    """What is known of a batch without its payload."""

    id: str
    run: str
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
    """Leases that were lost, or given back with an error, after training on the batch had begun."""
    scoring_attempts: int
    """Scorings that failed."""
    consumer: str | None


class Event(Answer):
    """One line of a batch's history. at: Unix seconds."""

    at: float
    state: State
    detail: str


class BatchDetails(BatchSummary):
    history: list[Event]


class BatchPage(Answer):
    batches: list[BatchSummary]
    next_cursor: str | None
    """Give it as `cursor` for the next page; null on the last."""


class PromptView(Answer):
    text: str | None
    """null where the server has no tokenizer."""
    ids: list[int]


class RowView(Answer):
    """One completion. Rewards are null where it could not be judged, log-probs where there are none."""

    text: str | None
    ids: list[int]
    tokens: list[str | None]
    sampler_logps: list[float] | None
    ref_logps: list[float] | None
    reward: float | None
    rewards: dict[str, float | None]
    finished: bool


class TokensView(Answer):
    id: str
    prompt: PromptView
    rows: list[RowView]


# The queue


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
    """Of those who asked for scores at once."""
    errors: int
    splits: int = 0
    """Forwards that the memory did not suffice for, and that were done in parts."""
    working_seconds: float
    waiting_seconds: float
    tokens_per_second: float


class LimitsView(Answer):
    max_batches: int
    max_batches_per_run: int
    max_bytes: int
    max_bytes_per_run: int
    max_in_flight: int
    max_in_flight_per_run: int
    max_deliveries: int
    max_scoring_attempts: int


class QueueView(Answer):
    model_config = ConfigDict(extra="allow")

    states: dict[State, Depth]
    runs: dict[str, dict[State, Depth]]
    """By run, only states that have batches."""
    oldest_age_seconds: float | None
    """How long the oldest waiting batch has waited; null when none waits."""
    scoring: ScoringView
    limits: LimitsView
    since_start: dict[str, int] = {}
    """What the answering server has done since it started; several may share a queue."""


# Leases


class LeaseBody(Request):
    model_config = _example(consumer="trainer", run="curl", wait_seconds=20, lease_seconds=120)

    consumer: Name
    """Who leases."""
    incarnation: Name | None = None
    """One life of the consumer: a new one ends the leases of the one before."""
    request_id: Name | None = None
    """Repeating it returns the same batch and token: a lost answer strands nothing."""
    run: Name | None = None
    """Only batches of this run; `legacy` is the Simple-GRPO protocol's own."""
    epoch: Version | None = None
    policy_version: Version | None = None
    max_lag: Version | None = None
    """Batches of the run that are more versions older than policy_version become expired."""
    order: Order = Order.FIFO
    wait_seconds: float = Field(default=20, ge=0, le=300, strict=True)
    lease_seconds: Seconds = 120

    @model_validator(mode="after")
    def _versions_belong_to_a_run(self) -> "LeaseBody":
        if self.run is None and (self.epoch is not None or self.max_lag is not None):
            raise ValueError("epoch and max_lag need run: versions are compared within one run")
        if self.max_lag is not None and self.policy_version is None:
            raise ValueError("max_lag needs policy_version, the version that the lag is counted from")
        return self

    @field_validator("run")
    @classmethod
    def _run_has_leases(cls, run: str | None) -> str | None:
        if run == LEGACY_RUN:
            raise ValueError(f"{LEGACY_RUN!r} is the run of the Simple-GRPO protocol: GET /get takes its batches")
        return run


class Key(Request):
    """A lease: the `Batch-Id` and `Lease-Token` that came with the batch."""

    id: str = Field(max_length=200)
    token: str = Field(max_length=200)


class LeasesBody(Request):
    leases: Annotated[list[Key], Field(fail_fast=True)] = Field(max_length=10_000)


class AckBody(LeasesBody):
    model_config = _example(leases=[{"id": _ID, "token": "f3…"}], checkpoint="step-40")

    checkpoint: str | None = Field(default=None, max_length=1000)
    """What holds their effect; it is written into their history."""


class ExtendBody(LeasesBody):
    model_config = _example(leases=[{"id": _ID, "token": "f3…"}], lease_seconds=120, started=True)

    lease_seconds: Seconds = 120
    started: bool = Field(default=False, strict=True)
    """Training on them begins: from here on a loss counts as a delivery."""


class ReleaseBody(LeasesBody):
    model_config = _example(leases=[{"id": _ID, "token": "f3…"}])

    error: str | None = Field(default=None, max_length=10_000)
    """Why they cannot be used; it counts as a delivery."""


class Result(Answer):
    id: str
    outcome: Outcome


class Results(Answer):
    results: list[Result]


# Errors


class ErrorDetail(Answer):
    code: str
    message: str
    field: str | None = None
    """The part of the request that is wrong."""
    request_id: str


class Error(Answer):
    error: ErrorDetail
