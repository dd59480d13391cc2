"""Log-probs on demand, and the reference model that computes them."""

from typing import Annotated

from pydantic import Field, model_validator

from shared.api.base import Name, RequestRecord, ResponseRecord, Version, example
from shared.batch import MAX_TEMPERATURE, MIN_TEMPERATURE

TokenId = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
# fail_fast: report only the first fault, since a report of a million would take a minute.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Rows = Annotated[list[TokenIds], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]


class LogprobsRequest(RequestRecord):
    """Either token ids (`prompt_ids` and lists of ids) or texts (`prompt` and strings)."""

    model_config = example(prompt="2+3=", completions=["5", "6"], temperature=1.0)

    prompt_ids: TokenIds | None = None
    prompt: str | None = None
    completions: _Rows | _Texts = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, strict=True)
    """The logits are divided by it."""

    @model_validator(mode="after")
    def _one_form(self) -> "LogprobsRequest":
        texts = isinstance(self.completions[0], str)
        if (self.prompt is None) == (self.prompt_ids is None) or texts != (self.prompt is not None):
            raise ValueError("give prompt_ids with completions of ids, or prompt with completions of text")
        return self


class Logprobs(ResponseRecord):
    """One row for each completion, one log-prob and one text for each of its tokens."""

    logprobs: list[list[float]]
    tokens: list[list[str]]
    reference_version: int


class ModelInfo(ResponseRecord):
    """The reference model. Without a model, all fields but the two maxima are null."""

    name: str | None
    revision: str | None
    vocabulary_size: int | None
    """Rows of the embedding: valid token ids are below it."""
    context_length: int | None
    """Tokens of a prompt and one completion together; null for a model without such a bound."""
    dtype: str | None
    device: str | None
    reference_version: int | None
    max_batch_tokens: int
    """Tokens of a batch: the prompt once and all completions."""
    max_image_bytes: int = 0
    """Bytes of the image tensors of a batch; 0 if it may have none, as with a model that takes no images."""
    tokenizer_fingerprint: str | None
    forward: str | None
    """How log-probs are computed: `packed-varlen` or `packed`, each prompt once; `padded` or `plain`, each prompt once
    for each of its completions. The names are in the order of their speed."""
    slowed_by: str | None = None
    """Why that is not the fastest form, and what would be faster, for people; null for the fastest on its device."""
    snapshot: str | None = None
    """The snapshot that replaced the model's first weights; null if none did."""
    wanted_version: int | None = None
    """Version of the reference that the queue requires; above reference_version while this server is loading it, or if
    it cannot."""
    teacher: str | None = None
    """A second model, whose log-probs batches get as `teacher_logps`. Null without one."""


class ReferenceBody(RequestRecord):
    """A snapshot below the server's `--snapshot-root`, and the version that batches scored with it carry.

    Without a snapshot: the weights of `--model` again.
    """

    model_config = example(snapshot="step-200", version=1)

    snapshot: Name | None = None
    version: Version


class ReferenceVersion(ResponseRecord):
    reference_version: int
