"""What has been scored since the server started."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from ref_server.metrics.counters import SECONDS, SINCE_START, value


class ScoringTotals:
    """batches, tokens: of the queue. direct_tokens: of direct requests. errors: failed attempts.

    splits: forwards that were halved. working_seconds, waiting_seconds: of the scoring loop. forward_seconds: each
    forward. batch_seconds: from the claim of each batch until its scores were saved.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.batches = self._counter("scored_batches", "Queued batches scored")
        self.tokens = self._counter("scored_tokens", "Tokens of queued batches scored, prompts included")
        self.direct_tokens = self._counter("direct_scored_tokens", "Tokens scored for /v1/logprobs, prompts included")
        self.errors = self._counter("scoring_errors", "Attempts at scoring a batch that failed")
        self.splits = self._counter("forward_splits", "Forwards halved because memory did not suffice")
        self.working_seconds = self._counter("scoring_working_seconds", "Seconds that the scoring loop scored")
        self.waiting_seconds = self._counter(
            "scoring_waiting_seconds", "Seconds that the scoring loop waited for batches"
        )
        self.forward_seconds = self._histogram("forward_seconds", "One forward of the reference model.")
        self.batch_seconds = self._histogram("score_seconds", "From the claim of a batch until its scores were stored.")

    def counts(self) -> dict[str, float]:
        """The counters by their names here."""
        return {name: value(counter) for name, counter in vars(self).items() if isinstance(counter, Counter)}

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"tandem_{name}", f"{help}, {SINCE_START}", registry=self.registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"tandem_{name}", help, buckets=SECONDS, registry=self.registry)
