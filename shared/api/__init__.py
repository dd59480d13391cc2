"""The records that server and clients exchange: the bodies of the HTTP API, as OpenAPI shows them.

There is one record for each concept, and the server's queue and service use it too: `queue.get` returns the
`BatchDetails` that the route answers and that a client reads. They are pydantic models, since they are checked where
they enter a process and become JSON where they leave it. Batches themselves travel as safetensors (`wire.py`).
"""

from shared.api.base import Error, ErrorDetail, RequestRecord, ResponseRecord
from shared.api.batches import (
    CURSOR,
    LEGACY_RUN,
    MAX_UPLOADS,
    MAX_UPLOADS_BYTES,
    Admitted,
    BatchDetails,
    BatchPage,
    BatchSummary,
    Depth,
    Event,
    LimitsView,
    ListOrder,
    PromptView,
    PurgeableState,
    PurgeBody,
    Purged,
    QueueView,
    RewardsView,
    RowView,
    ScoringView,
    State,
    ThroughputView,
    TokensView,
    Uploaded,
    UploadResult,
    UploadResults,
)
from shared.api.leases import (
    MAX_LEASES,
    AckBody,
    ExtendBody,
    Lease,
    LeaseBody,
    LeaseKey,
    LeaseResult,
    LeaseResults,
    LeasesBody,
    Order,
    Outcome,
    ReleaseBody,
)
from shared.api.runs import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    FinishBody,
    Finished,
    Kind,
    MetricsBody,
    MetricsEvent,
    MetricsKept,
    MetricsRecord,
    RunMetrics,
    RunPage,
    RunSummary,
    StepRecords,
)
from shared.api.scoring import Logprobs, LogprobsRequest, ModelInfo, ReferenceBody, ReferenceVersion, TokenIds
from shared.api.weights import PLAIN_NAME, CommitBody, PlainName, WeightsFile, WeightsName, WeightsVersion
