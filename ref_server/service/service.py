"""The server's operations, without HTTP: check and admit uploads, replace the reference, describe batches and queue."""

import asyncio
from collections.abc import Callable, Sequence

import structlog
from anyio import CapacityLimiter, to_thread

from ref_server.access.keys import ANYBODY, Principal
from ref_server.background import BackgroundLoop
from ref_server.config import ServeConfig
from ref_server.metrics import Count
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.queue.records import Payload, Stats, Upload
from ref_server.scoring.reference import NotReady, ReferenceModel, group_of
from ref_server.service.polls import Polls
from ref_server.service.reference import CurrentReference
from ref_server.service.throughput import Throughput
from ref_server.service.views import RunSelection, describe_queue, describe_rewards, describe_tokens, pictures_of
from ref_server.service.weights import ServedWeights
from shared import wire
from shared.api import LEGACY_RUN, BatchSummary, Lease, ModelInfo, QueueView, RewardsView, State, TokensView, Uploaded
from shared.batch import Batch, BatchError, TokenGroup
from shared.pictures import png

log = structlog.get_logger()

# The stores are tidied this often, a slice at a time, so that requests get their turn between the slices.
TIDY_SECONDS = 60.0
BETWEEN_SLICES_SECONDS = 0.05


class Service:
    """Joins the reference model, the queue and the scoring loop. The HTTP routes call it."""

    def __init__(self, reference: ReferenceModel, queue: Queue, config: ServeConfig) -> None:
        self.config = config
        self.queue = queue
        self.polls = Polls()
        self._tasks: list[asyncio.Task[None]] = []
        self.draining = False
        self._endings: list[Callable[[], None]] = []
        self.closed = False
        self.weights = ServedWeights(config, queue, self.check_open)
        self._served = CurrentReference(
            reference, queue, tokens_per_forward=config.scoring_tokens, on_ready=self.polls.look_now
        )
        self.scoring = self._served.scoring
        self.throughput = Throughput(self._totals)
        self._tidying = {
            BackgroundLoop("queue cleanup"): self.queue.tidy,
            BackgroundLoop("weights cleanup"): self.weights.tidy,
        }
        self.loops = [self.polls.background, self._served.background, *self._tidying]
        """The loops whose failures make /readyz answer 503."""

    def start(self) -> None:
        work = [self.polls.watch(self.queue), self.throughput.watch()]
        work += (_keep_tidy(tidy, loop) for loop, tidy in self._tidying.items())
        self._tasks = [asyncio.create_task(each) for each in work]
        self._served.start()

    def at_draining(self, end: Callable[[], None]) -> None:
        """Registers `end`, to be called when draining starts: it ends what would stay open. It must not block."""
        self._endings.append(end)

    def drain(self) -> None:
        """Refuses new work, ends the long polls, lets the scoring loop finish its batches. Returns at once."""
        self.draining = True
        self._served.stop()
        self.polls.wake_all()
        self.weights.wake()
        for end in self._endings:
            end()

    def close(self) -> None:
        """Waits until the batches being scored are saved, then closes the store."""
        self._served.stop()
        self.scoring.join()
        self.queue.close()
        self.closed = True

    def check_open(self) -> None:
        """Raises NotReady while the server drains."""
        if self.draining:
            raise NotReady("the server is shutting down")

    @property
    def reference(self) -> ReferenceModel:
        return self._served.current

    @property
    def model(self) -> ModelInfo:
        """Describes the reference model, and which version of it the queue wants; all None without a model."""
        info = self.reference.info
        wanted = None if info.reference_version is None else self.wanted_reference_version
        return info.model_copy(update={"wanted_version": wanted})

    @property
    def wanted_reference_version(self) -> int:
        """Version of the reference that all servers of the queue should score with."""
        return self._served.wanted_version

    def replace_reference(self, snapshot: str | None, version: int) -> int:
        """As `CurrentReference.replace`."""
        self.check_open()
        with self.weights.reading(snapshot):
            return self._served.replace(snapshot, version)

    @property
    def scores(self) -> bool:
        """Whether the scoring loop of every device runs; true without a model."""
        return self.scoring.alive and not self.scoring.failed

    def not_working_reason(self) -> str | None:
        """Why this process does not score batches, or None. Does not check the store."""
        if self.draining:
            return "the server is shutting down"
        if not self.scores:
            return "the scoring loop has ended"
        if self._served.lacking is not None:
            return f"no batch is scored here: {self._served.lacking}"
        if any(task.done() for task in self._tasks):
            return "a background loop has ended; the log has the reason"
        return next((failure for loop in self.loops if (failure := loop.failure)), None)

    def broken_store_reason(self) -> str | None:
        """Why an upload could not be stored now, or None. Writes to the store, durably."""
        try:
            self.queue.check()
        except StorageFull as error:
            return f"the queue takes no uploads: {error}"
        except StorageBroken as error:
            return f"the queue cannot be written: {error}"
        return None

    def admit(self, body: bytes, caller: Principal = ANYBODY) -> Uploaded:
        """Checks one upload and queues it, durably. Raises BatchError, Denied, NotReady, what `Queue.put` raises."""
        self.check_open()
        metadata, tensors = wire.parse(body)
        batch = self._check_rollout(wire.to_batch(metadata, tensors))
        caller.only(batch.run)
        if batch.run == LEGACY_RUN:
            raise BatchError("run", f"must not be {LEGACY_RUN!r}, the run of the Simple-GRPO protocol")
        upload = Upload(
            id=batch.id,
            content_hash=wire.hash_content(metadata, tensors),
            run=batch.run,
            lineage=batch.lineage,
            uploader=caller.token,
            epoch=batch.epoch,
            policy_version=batch.policy_version,
            prompt_tokens=len(batch.group.prompt_ids),
            completion_tokens=len(batch.group.completion_ids),
            completions=batch.group.size,
            body=body,
            to_score=self.reference.scores_uploads,
        )
        uploaded = self.queue.put(upload)
        self.scoring.ring()
        if uploaded.state is State.READY:
            self.polls.ring(upload.run)
        return uploaded

    def read_leased(self, leases: Sequence[Lease]) -> list[tuple[Lease, bytes]]:
        """Each lease with its batch, scores included; without batches whose payload is gone by now."""
        stored = {lease.id: Payload(lease.body, lease.scores) for lease in leases if lease.body is not None}
        if later := [lease.id for lease in leases if lease.body is None]:
            stored |= self.queue.payloads(later)
        # pop: each body goes once it is copied, so that no second copy of all is in memory.
        return [(lease, wire.with_scores(*stored.pop(lease.id))) for lease in leases if lease.id in stored]

    def finish(self, run: str, lineage: str) -> int:
        """Ends a lineage of a run; returns how many batches expired. Raises BatchError for the legacy run."""
        if run == LEGACY_RUN:
            raise BatchError("run", f"must be another one: {LEGACY_RUN!r} has no trainer that leases")
        return self.queue.finish(run, lineage)

    def read_rollout(self, body: bytes) -> Batch:
        """Decodes a rollout batch and checks it against the reference. Raises BatchError, TooLarge."""
        return self._check_rollout(wire.decode(body))

    def _check_rollout(self, batch: Batch) -> Batch:
        if batch.ref_logps is not None:
            raise BatchError("format", f"must be {wire.ROLLOUT_FORMAT!r}: a batch is uploaded before it is scored")
        self.reference.check_group(batch.group)
        return batch

    def tokenize(self, prompt: str, completions: Sequence[str]) -> TokenGroup:
        """Texts -> tokens, each separately and without special tokens. Raises BatchError if one is empty, NoModel."""
        return group_of(self.reference.encode(prompt), [self.reference.encode(text) for text in completions])

    def describe_queue(self, stats: Stats, runs: RunSelection) -> QueueView:
        """runs: those that are listed one by one."""
        return describe_queue(stats, runs, self.queue.activity.counts(), self.scoring.totals, self.config.queue.limits)

    def _totals(self) -> dict[str, float]:
        """Since the start of this process, by the names of `ThroughputView`."""
        counts, scored = self.queue.activity.counts(), self.scoring.totals.counts()
        return {
            "tokens": scored["tokens"] + scored["direct_tokens"],
            "uploaded": counts[Count.ADMITTED],
            "taken": counts[Count.LEASED] - counts[Count.REDELIVERED],  # acks come with checkpoints, many at once
            "working": scored["working_seconds"],
            "waiting": scored["waiting_seconds"],
        }

    def describe_tokens(self, batch: BatchSummary) -> TokensView | None:
        """The tokens of a batch with texts and log-probs, and its training record; None when its payload is gone.

        Raises BatchError for a batch of the Simple-GRPO protocol.
        """
        report = self.queue.training(batch.id)  # first: it goes with the payload
        content = self._stored(batch)
        return content and describe_tokens(content, wire.decode_training(report) if report else None, self.reference)

    def describe_rewards(self, batch: BatchSummary) -> RewardsView | None:
        """As describe_tokens, without tokens; prompt and gold answer are shortened."""
        content = self._stored(batch)
        return content and describe_rewards(content, self.reference)

    def picture(self, batch: BatchSummary, number: int) -> bytes | None:
        """A picture of the prompt as a PNG file; None where there is none. Raises BatchError like describe_tokens."""
        content = self._stored(batch)
        shown = pictures_of(content) if content else []
        return png(shown[number]) if number < len(shown) else None

    def keep_training(self, batch: BatchSummary, body: bytes) -> None:
        """Stores what training made of a batch. Raises BatchError, and what `Queue.put_training` raises."""
        report = wire.decode_training(body)
        report.check_fits(batch.completion_tokens)
        self.queue.put_training(batch.id, wire.encode_training(report))

    def _stored(self, batch: BatchSummary) -> Batch | None:
        if batch.run == LEGACY_RUN:
            raise BatchError("run", f"is {LEGACY_RUN!r}: the Simple-GRPO protocol's batches have a form of their own")
        stored = self.queue.payload(batch.id)
        return None if stored is None else wire.decode(wire.with_scores(*stored))


async def _keep_tidy(tidy: Callable[[], bool], loop: BackgroundLoop) -> None:
    """Tidies a store again and again. tidy: does a slice of the work; returns whether there is more."""
    thread = CapacityLimiter(1)
    while True:
        more = False
        with loop.turn():
            try:
                more = await to_thread.run_sync(tidy, limiter=thread)
            except (StorageBroken, StorageFull) as error:
                log.warning("a store cannot be tidied", error=str(error))
        await asyncio.sleep(loop.pause or (BETWEEN_SLICES_SECONDS if more else TIDY_SECONDS))
