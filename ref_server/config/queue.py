"""How much the queue holds, and for how long."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.api import LimitsView

MIB = 2**20
# A batch is dead after this many failed scorings.
_SCORING_ATTEMPTS = 3


class QueueConfig(BaseModel):
    """Limits of waiting and of leased batches. A full queue answers 429, and clients wait."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_batches: int = Field(default=10_000, ge=2)
    """Batches that may wait in all runs together. Of these and the next two limits a run may use at most as much as is
    free: half when it is alone, a third each when there are two. A token's runs together get at most three quarters."""
    max_batches_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the batches that wait in one run."""
    max_mib: int = Field(default=4096, ge=2)
    """MiB of payload that may wait in all."""
    max_mib_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the MiB of payload that wait in one run."""
    max_stored_mib: int | None = Field(default=None, ge=2)
    """MiB of payload that are stored in all, whatever the state of their batches; by default twice max_mib. Beyond it
    payloads of dead and expired batches go, the longest settled first; of the rest a run may use at most as much as is
    free."""
    min_free_mib: int | None = Field(default=None, ge=0)
    """MiB of data_dir's disk that uploads leave free, those of weights too, for acks and what else makes room. By
    default 256, or a twentieth of a smaller disk; 0 lets uploads fill it. A database's disk is not looked at."""
    max_in_flight: int = Field(default=4096, ge=2)
    """Batches that may be leased and not yet acknowledged in all; a trainer checkpoints at half of its run's share."""
    max_in_flight_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the batches of one run that are leased and not yet acknowledged."""
    keep_samples: int = Field(default=256, ge=0)
    """Trained batches of a run that are kept to be looked at, of those that its trainer chose as samples; 0 keeps none.
    Like dead and expired ones they go when room is needed, and after retention_days."""
    max_deliveries: int = Field(default=5, ge=1)
    """A batch is dead after this many failed deliveries, or interrupted scorings (its server ended)."""
    max_waiting_days: float = Field(default=7, gt=0)
    """A batch expires when it has waited so many days and nothing has happened to it."""
    retention_days: float = Field(default=30, gt=0)
    """Days for which the id of a settled batch is remembered, so that uploading it again is harmless."""

    @model_validator(mode="after")
    def _what_waits_can_be_stored(self) -> "QueueConfig":
        if self.max_stored_mib is not None and self.max_stored_mib < self.max_mib:
            raise ValueError(
                f"max_stored_mib: {self.max_stored_mib} must be at least max_mib ({self.max_mib}): what waits is stored"
            )
        return self

    @property
    def min_free(self) -> int | None:
        """min_free_mib in bytes."""
        return None if self.min_free_mib is None else self.min_free_mib * MIB

    @property
    def limits(self) -> LimitsView:
        return LimitsView(
            max_batches=self.max_batches,
            max_batches_per_run=_of_one_run(self.max_batches, self.max_batches_per_run),
            max_bytes=self.max_mib * MIB,
            max_bytes_per_run=_of_one_run(self.max_mib * MIB, self.max_mib_per_run and self.max_mib_per_run * MIB),
            keep_samples=self.keep_samples,
            max_stored_bytes=(self.max_stored_mib or 2 * self.max_mib) * MIB,
            max_in_flight=self.max_in_flight,
            max_in_flight_per_run=_of_one_run(self.max_in_flight, self.max_in_flight_per_run),
            max_deliveries=self.max_deliveries,
            max_scoring_attempts=_SCORING_ATTEMPTS,
        )


def _of_one_run(of_all: int, bound: int | None) -> int:
    """The most that a run may have when it is alone: at most as much as is free."""
    alone = of_all // 2
    return alone if bound is None else min(bound, alone)
