"""What has been scored since the server started, by device."""

from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, Counter, Histogram

from ref_server.metrics import SECONDS, SINCE_START, value

_DEVICE = ["device"]


@dataclass(frozen=True)
class DeviceTotals:
    """batches, tokens: of the queue. direct_tokens: of direct requests. errors: failed attempts.

    splits: forwards that were halved. working_seconds, waiting_seconds: of the scoring loop. forward_seconds: each
    forward. batch_seconds: from the claim of each batch until its scores were saved.
    """

    batches: Counter
    tokens: Counter
    direct_tokens: Counter
    errors: Counter
    splits: Counter
    working_seconds: Counter
    waiting_seconds: Counter
    forward_seconds: Histogram
    batch_seconds: Histogram


class ScoringTotals:
    """The totals of all devices of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._all = DeviceTotals(
            batches=self._counter("scored_batches", "Queued batches scored"),
            tokens=self._counter("scored_tokens", "Tokens of queued batches scored, prompts included"),
            direct_tokens=self._counter("direct_scored_tokens", "Tokens scored for /v1/logprobs, prompts included"),
            errors=self._counter("scoring_errors", "Attempts at scoring a batch that failed"),
            splits=self._counter("forward_splits", "Forwards halved because memory did not suffice"),
            working_seconds=self._counter("scoring_working_seconds", "Seconds that the scoring loop scored"),
            waiting_seconds=self._counter(
                "scoring_waiting_seconds", "Seconds that the scoring loop waited for batches"
            ),
            forward_seconds=self._histogram("forward_seconds", "One forward of the reference model."),
            batch_seconds=self._histogram("score_seconds", "From the claim of a batch until its scores were stored."),
        )

    def of(self, device: str) -> DeviceTotals:
        """The totals of one device. Replicas on the same device share them."""
        return DeviceTotals(
            **{field.name: getattr(self._all, field.name).labels(device) for field in fields(self._all)}
        )

    def counts(self) -> dict[str, float]:
        """The counters by their names here, summed over the devices."""
        return {name: value(counter) for name, counter in vars(self._all).items() if isinstance(counter, Counter)}

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"tandem_{name}", f"{help}, {SINCE_START}", _DEVICE, registry=self.registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"tandem_{name}", help, _DEVICE, buckets=SECONDS, registry=self.registry)
