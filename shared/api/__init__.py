"""The records that server and clients exchange: the bodies of the HTTP API, as OpenAPI shows them.

There is one record for each concept, and the server's queue and service use it too: `queue.get` returns the
`BatchDetails` that the route answers and that a client reads. They are pydantic models, since they are checked where
they enter a process and become JSON where they leave it. Batches themselves travel as safetensors (`wire.py`).
"""

from shared.api.base import Answer, Request
from shared.api.batches import (
    CURSOR,
    Admitted,
    BatchDetails,
    BatchPage,
    BatchSummary,
    Event,
    PromptView,
    PurgeableState,
    PurgeBody,
    Purged,
    RewardsView,
    RowView,
    TokensView,
    Uploaded,
)
from shared.api.errors import Error, ErrorDetail
from shared.api.leases import (
    MAX_LEASES,
    AckBody,
    ExtendBody,
    Key,
    LeaseBody,
    LeasedHead,
    LeasesBody,
    ReleaseBody,
    Result,
    Results,
)
from shared.api.queue import Depth, LimitsView, QueueView, ScoringView
from shared.api.runs import FinishBody, Finished
from shared.api.scoring import Logprobs, LogprobsRequest, ModelInfo, ReferenceBody, ReferenceVersion, TokenIds
from shared.api.states import LEGACY_RUN, ListOrder, Order, Outcome, State
from shared.api.weights import PLAIN_NAME, CommitBody, PlainName, WeightsFile, WeightsName, WeightsVersion

__all__ = [
    "CURSOR",
    "LEGACY_RUN",
    "MAX_LEASES",
    "PLAIN_NAME",
    "AckBody",
    "Admitted",
    "Answer",
    "BatchDetails",
    "BatchPage",
    "BatchSummary",
    "CommitBody",
    "Depth",
    "Error",
    "ErrorDetail",
    "Event",
    "ExtendBody",
    "FinishBody",
    "Finished",
    "Key",
    "LeaseBody",
    "LeasedHead",
    "LeasesBody",
    "LimitsView",
    "ListOrder",
    "Logprobs",
    "LogprobsRequest",
    "ModelInfo",
    "Order",
    "Outcome",
    "PlainName",
    "PromptView",
    "PurgeBody",
    "PurgeableState",
    "Purged",
    "QueueView",
    "ReferenceBody",
    "ReferenceVersion",
    "ReleaseBody",
    "Request",
    "Result",
    "Results",
    "RewardsView",
    "RowView",
    "ScoringView",
    "State",
    "TokenIds",
    "TokensView",
    "Uploaded",
    "WeightsFile",
    "WeightsName",
    "WeightsVersion",
]
