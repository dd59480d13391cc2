"""The client's methods for log-probs without the queue."""

from collections.abc import Mapping, Sequence
from uuid import uuid4

import httpx
import numpy as np

from shared import wire
from shared.api import Logprobs, LogprobsRequest, TokenIds
from shared.batch import Array, Batch, TokenGroup
from shared.client.connection import ApiCall, ServerConnection, as_record

# A lease has 64 MiB, or a single batch as long as the server's max_body_mib and its log-probs; its tokens as JSON take
# five times that. No legal answer comes near this.
BATCH_BYTES = 2 * 2**30
# Enough for a large batch on a slow machine, queued behind others.
SCORING_SECONDS = 600.0
BATCH_HEADERS = {"Content-Type": wire.CONTENT_TYPE}


class ScoringClient(ServerConnection):
    """The methods of `RefServerClient` that are about log-probs. The server stores nothing of what they send."""

    def logprobs(self, prompt: str, completions: Sequence[str], *, temperature: float = 1.0) -> Logprobs:
        """Scores texts now. Each is tokenised separately, without special tokens. The server stores nothing."""
        return self._logprobs(LogprobsRequest(prompt=prompt, completions=[*completions], temperature=temperature))

    def logprobs_of_ids(
        self,
        prompt_ids: Sequence[int],
        completions: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        images: Mapping[str, Array] | None = None,
    ) -> Logprobs:
        """Scores token ids now. The server stores nothing.

        images: float32, uint8 or int64 tensors of the prompt's images, as the model's processor makes them, such as
        pixel_values and image_grid_thw. prompt_ids then contain a placeholder for each image feature. Raises BatchError
        if a tensor is invalid.
        """
        if images:
            group = TokenGroup(
                np.array(prompt_ids, np.int64),
                np.array([id for row in completions for id in row], np.int64),
                np.array([len(row) for row in completions], np.int64),
                images,
            )
            return self._logprobs_of_group(group, temperature)
        rows: list[TokenIds] = [[*row] for row in completions]
        return self._logprobs(LogprobsRequest(prompt_ids=[*prompt_ids], completions=rows, temperature=temperature))

    def score(self, batch: Batch | bytes) -> Batch:
        """Scores a whole batch now, at its own temperature. The server stores nothing."""

        def read(response: httpx.Response) -> Batch:
            scored = wire.decode(response.content)
            if scored.ref_logps is None:
                raise ValueError("a scored batch was expected")
            return scored

        return self._send(
            ApiCall(
                "POST",
                "/v1/logprobs",
                read,
                encoded(batch),
                BATCH_HEADERS,
                read_seconds=SCORING_SECONDS,
                most=BATCH_BYTES,
            )
        )

    def _logprobs(self, body: LogprobsRequest) -> Logprobs:
        return self._post("/v1/logprobs", body, Logprobs, read_seconds=SCORING_SECONDS)

    def _logprobs_of_group(self, group: TokenGroup, temperature: float) -> Logprobs:
        """Sends a batch, since JSON takes no images. What is no part of the group has no effect."""
        batch = Batch(
            id=str(uuid4()),
            run="logprobs",
            epoch=0,
            policy_version=0,
            temperature=temperature,
            group=group,
            rewards=np.zeros(group.size, np.float32),
            finished=np.ones(group.size, np.bool_),
        )
        headers = BATCH_HEADERS | {"Accept": "application/json"}
        return self._send(
            ApiCall(
                "POST", "/v1/logprobs", as_record(Logprobs), wire.encode(batch), headers, read_seconds=SCORING_SECONDS
            )
        )


def encoded(batch: Batch | bytes) -> bytes:
    return batch if isinstance(batch, bytes) else wire.encode(batch)
