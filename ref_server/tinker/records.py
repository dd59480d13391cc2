"""Bodies of the requests of tinker's client, and the protocol buffer in which it reads log-probs.

From the `tinker` package 0.38: its `types` and `tinker_public.proto`.
"""

from typing import Literal

import numpy as np
from pydantic import BaseModel, Field, field_validator

from shared.api.base import Name, RequestRecord, Version
from shared.api.scoring import TokenIds

PROTOBUF = "application/x-protobuf"


class EncodedText(RequestRecord):
    """Tokens of a prompt. Pictures are refused."""

    type: Literal["encoded_text"]
    tokens: TokenIds


class ModelInput(RequestRecord):
    chunks: list[EncodedText]


class SamplingParams(RequestRecord):
    """Of these only max_tokens says anything here: no token is sampled."""

    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    top_k: int = -1
    top_p: float = 1.0

    @field_validator("max_tokens")
    @classmethod
    def _scores_only(cls, value: int | None) -> int | None:
        if value != 1:
            raise ValueError("must be 1: this server computes log-probs of prompts, and does not sample")
        return value


class SampleRequest(RequestRecord):
    """The body of `asample`, as `SamplingClient.compute_logprobs` sends it."""

    sampling_session_id: Name
    seq_id: Version
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    num_samples: Literal[1] = 1
    base_model: None = None
    model_path: None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"

    @field_validator("prompt_logprobs")
    @classmethod
    def _scores(cls, value: bool | None) -> bool | None:
        if not value:
            raise ValueError("must be true: this server computes log-probs of prompts, and does not sample")
        return value

    def ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class SamplingSessionRequest(BaseModel):
    """The body of `create_sampling_session`."""

    session_id: Name
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class RetrieveRequest(BaseModel):
    """The body of `retrieve_future`."""

    request_id: str


def encode_response(logps: np.ndarray) -> bytes:
    """A `SampleResponse` without samples. logps: float32 (P,) of a prompt's tokens, NaN where there is none."""
    content = logps.astype("<f4").tobytes()
    return b"\x12" + _varint(len(content)) + content  # field 2, prompt_logprobs, of wire type 2: length and bytes


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first; all bytes but the last have the eighth bit set."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
