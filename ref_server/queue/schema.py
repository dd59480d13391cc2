"""The tables and indexes that both stores have, and the version number of a store.

The stores differ in the names of types and in how they count batches (the table `depths`): `sqlite/schema.py` and
`postgres/schema.py` have that. Payloads have their own table, so a scan of batches never reads them.
"""

from collections.abc import Mapping

from shared.api import Order

# Grows by one with every release that changes a table. Each store has the step from one version to the next.
SCHEMA_VERSION = 2

# Batches that may still be leased. SQLite uses an index with a condition for queries that have the same condition.
WAITING = "state IN ('queued', 'ready')"
# Settled batches that still have their payload.
KEPT = "settled_at IS NOT NULL AND payload_bytes > 0"
# Kept samples: trained batches that still have their payload.
SAMPLE = "state = 'done' AND payload_bytes > 0"

# In every order, batches that came back from a lease come first.
ORDERS = {
    Order.FIFO: "returned DESC, seq",
    Order.FRESHEST: "returned DESC, policy_version DESC, seq DESC",
}

_TABLES = """
CREATE TABLE batches (
    seq               {serial},                         -- order of admission
    id                {text} NOT NULL UNIQUE,
    content_hash      {bytes} NOT NULL,
    run               {text} NOT NULL,
    lineage           {text} NOT NULL DEFAULT '',       -- the training that sampled it, among those of the run's name
    uploader          {text} NOT NULL DEFAULT '',       -- name of the token that it was uploaded with, if any
    epoch             {integer} NOT NULL,
    policy_version    {integer} NOT NULL,
    prompt_tokens     {integer} NOT NULL,
    completion_tokens {integer} NOT NULL,
    completions       {integer} NOT NULL,
    payload_bytes     {integer} NOT NULL,               -- 0 once the payload is deleted
    admitted_at       {real} NOT NULL,                  -- Unix seconds
    state             {text} NOT NULL,
    reason            {text},                           -- why the batch is expired or dead
    settled_at        {real},                           -- Unix seconds; when it became done, expired or dead
    scored            {flag} NOT NULL DEFAULT FALSE,
    scoring_attempts  {integer} NOT NULL DEFAULT 0,     -- failed ones
    interruptions     {integer} NOT NULL DEFAULT 0,     -- how often a server ended while scoring it
    scorer            {text},                           -- the server that has claimed it, while scoring
    deliveries        {integer} NOT NULL DEFAULT 0,     -- lost after training had started, or released with an error
    returned          {flag} NOT NULL DEFAULT FALSE,    -- it came back from a lease, so it is leased first
    in_doubt          {flag} NOT NULL DEFAULT FALSE,    -- lost while trained on: a checkpoint may contain its effect
    released_token    {text},                           -- of the last released lease, to recognise a repeated release
    token             {text},                           -- of the current lease, or of the one that settled the batch
    consumer          {text},
    incarnation       {text},
    request_id        {text},
    lease_seconds     {real},
    expires           {real},                           -- of the lease or the claim, on the store's clock of leases
    started           {flag} NOT NULL DEFAULT FALSE
) {strict};

-- What was uploaded. It is never written again: an update in SQLite writes the whole row.
CREATE TABLE payloads (
    seq  {integer} PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    body {bytes} NOT NULL
) {strict};

-- What scoring adds to the payload (`shared.wire.encode_scores`).
CREATE TABLE scores (
    seq  {integer} PRIMARY KEY REFERENCES payloads ON DELETE CASCADE,
    body {bytes} NOT NULL
) {strict};

-- How training used the batch (`shared.batch.Training`), if that was recorded.
CREATE TABLE training (
    seq  {integer} PRIMARY KEY REFERENCES payloads ON DELETE CASCADE,
    body {bytes} NOT NULL
) {strict};

CREATE TABLE events (
    number {serial},
    seq    {integer} NOT NULL REFERENCES batches ON DELETE CASCADE,
    at     {real} NOT NULL,                             -- Unix seconds
    state  {text} NOT NULL,
    detail {text} NOT NULL
) {strict};

-- The incarnations of each consumer, newest last, so that a late request of an older one can be refused.
CREATE TABLE incarnations (
    number      {serial},
    consumer    {text} NOT NULL,
    incarnation {text} NOT NULL,
    seen_at     {real} NOT NULL,
    UNIQUE (consumer, incarnation)
) {strict};

-- The policy version in the first lease request of each epoch of a lineage.
CREATE TABLE epochs (
    run          {text} NOT NULL,
    lineage      {text} NOT NULL,
    epoch        {integer} NOT NULL,
    fork_version {integer} NOT NULL,
    PRIMARY KEY (run, lineage, epoch)
) {keyed};

-- Which lineage owns a run: the one that leased last, its last sign of life (clock of leases), how long that holds.
CREATE TABLE runs (
    run      {text} PRIMARY KEY,
    lineage  {text} NOT NULL,
    heard    {real} NOT NULL,
    seconds  {real} NOT NULL,
    finished {flag} NOT NULL
) {keyed};

-- The weights that replaced those of --model, if any did: every server of the queue scores with them.
CREATE TABLE reference (
    one      {integer} PRIMARY KEY CHECK (one = 1),
    snapshot {text},                                    -- NULL: those of --model again
    version  {integer} NOT NULL,
    base     {text} NOT NULL                            -- fingerprint of the model that they replaced
) {strict};

-- Metrics that trainers report. A curve is the records of one kind, counted: lists of runs read none of them.
CREATE TABLE curves (
    run        {text} NOT NULL,
    lineage    {text} NOT NULL,
    kind       {text} NOT NULL,
    records    {integer} NOT NULL,
    bytes      {integer} NOT NULL,
    step       {integer} NOT NULL,                      -- the latest
    first_at   {real} NOT NULL,                         -- Unix seconds
    updated_at {real} NOT NULL,
    PRIMARY KEY (run, lineage, kind)
) {keyed};

CREATE TABLE metrics (
    run     {text} NOT NULL,
    lineage {text} NOT NULL,
    kind    {text} NOT NULL,
    step    {integer} NOT NULL,
    name    {text} NOT NULL,                            -- distinguishes the warnings of a step; else empty
    at      {real} NOT NULL,                            -- Unix seconds
    record  {text} NOT NULL,                            -- JSON, in ASCII
    PRIMARY KEY (run, lineage, kind, step, name),
    FOREIGN KEY (run, lineage, kind) REFERENCES curves ON DELETE CASCADE
) {strict};

CREATE TABLE probe (written_at {real} NOT NULL) {strict};
INSERT INTO probe VALUES (0);
"""

# With them, no request reads batches that it does not need.
_INDEXES = f"""
CREATE INDEX ready_fifo_of_run ON batches (run, lineage, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, lineage, returned DESC, policy_version DESC, seq DESC)
    WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, lineage, epoch, policy_version) WHERE {WAITING};
CREATE INDEX leases_of_lineage ON batches (run, lineage, lease_seconds) WHERE state = 'leased';
CREATE INDEX batches_in_state ON batches (state, seq);
CREATE INDEX ready_fifo ON batches (returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX leases_by_consumer ON batches (consumer, request_id) WHERE state = 'leased';
CREATE INDEX settled ON batches (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX kept_payloads ON batches (settled_at, seq) WHERE {KEPT};
CREATE INDEX samples_of_run ON batches (run, content_hash DESC, seq DESC) WHERE {SAMPLE};
CREATE INDEX waiting_by_age ON batches (admitted_at) WHERE {WAITING};
CREATE INDEX events_of_batch ON events (seq, number);
"""


def create_tables(types: Mapping[str, str]) -> str:
    """The SQL that creates the shared tables and indexes. types: the store's name for each placeholder above."""
    return _TABLES.format_map(types) + _INDEXES
