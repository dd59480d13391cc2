"""The JSON that clients send and get: the models behind the OpenAPI page."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ref_server.queue.interface import LeaseKey, LeaseRequest, Order, Outcome, State

Name = Annotated[str, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Version = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LogprobsRequest(Request):
    """Either token ids (`prompt_ids` and lists of ids) or texts (`prompt` and strings)."""

    prompt_ids: TokenIds | None = None
    prompt: str | None = None
    completions: list[TokenIds] | list[str] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_form(self) -> "LogprobsRequest":
        texts = isinstance(self.completions[0], str)
        if (self.prompt is None) == (self.prompt_ids is None) or texts != (self.prompt is not None):
            raise ValueError("give prompt_ids with completions of ids, or prompt with completions of text")
        return self


class LeaseBody(Request):
    consumer: Name
    incarnation: Name | None = None
    request_id: Name | None = None
    run: Name | None = None
    epoch: Version | None = None
    policy_version: Version | None = None
    max_lag: Version | None = None
    order: Order = Order.FIFO
    wait_seconds: float = Field(default=20, ge=0, le=300)
    lease_seconds: Seconds = 120

    @model_validator(mode="after")
    def _versions_belong_to_a_run(self) -> "LeaseBody":
        if self.run is None and (self.epoch is not None or self.max_lag is not None):
            raise ValueError("epoch and max_lag need run: versions are compared within one run")
        if self.max_lag is not None and self.policy_version is None:
            raise ValueError("max_lag needs policy_version, the version that the lag is counted from")
        return self

    def to_request(self) -> LeaseRequest:
        return LeaseRequest(**self.model_dump(exclude={"wait_seconds"}))


class Key(Request):
    id: str = Field(max_length=200)
    token: str = Field(max_length=200)


class LeasesBody(Request):
    leases: list[Key] = Field(max_length=10_000)

    def keys(self) -> list[LeaseKey]:
        return [LeaseKey(key.id, key.token) for key in self.leases]


class AckBody(LeasesBody):
    checkpoint: str | None = Field(default=None, max_length=1000)


class ExtendBody(LeasesBody):
    lease_seconds: Seconds = 120
    started: bool = False


class ReleaseBody(LeasesBody):
    error: str | None = Field(default=None, max_length=10_000)


class Logprobs(BaseModel):
    logprobs: list[list[float]]
    tokens: list[list[str]]
    reference_version: int


class Admitted(BaseModel):
    id: str
    state: State


class Result(BaseModel):
    id: str
    outcome: Outcome


class Results(BaseModel):
    results: list[Result]


class ErrorDetail(BaseModel):
    code: str
    message: str
    field: str | None = None
    request_id: str


class Error(BaseModel):
    error: ErrorDetail


class Problem(Exception):
    """An answer that is an error. `field` names the part of the request that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.headers = headers or {}

    def body(self, request_id: str) -> dict[str, Any]:
        detail = ErrorDetail(code=self.code, message=self.message, field=self.field, request_id=request_id)
        return Error(error=detail).model_dump(exclude_none=True)
