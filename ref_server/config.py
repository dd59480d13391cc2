"""What `ref-server serve` can be told, by file, environment (`REF_SERVER_…`) or command line."""

from ipaddress import ip_address
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, CliToggleFlag

from ref_server.queue.interface import Limits
from shared.settings import Dtype, settings_config

_MIB = 2**20


class QueueConfig(BaseModel):
    """How much may wait, and be out on lease. A full queue answers 429, and clients wait."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_batches: int = Field(default=Limits.max_batches, ge=1)
    """Batches that may wait in all runs together."""
    max_batches_per_run: int = Field(default=Limits.max_batches_per_run, ge=1)
    """Batches that may wait in one run."""
    max_mib: int = Field(default=Limits.max_bytes // _MIB, ge=1)
    """MiB of payload that may wait in all."""
    max_mib_per_run: int = Field(default=Limits.max_bytes_per_run // _MIB, ge=1)
    """MiB of payload that may wait in one run."""
    max_in_flight: int = Field(default=Limits.max_in_flight, ge=1)
    """Batches that may be leased and not yet acknowledged in all."""
    max_in_flight_per_run: int = Field(default=Limits.max_in_flight_per_run, ge=1)
    """Batches of one run that may be leased and not yet acknowledged; a trainer checkpoints at half of them."""
    max_deliveries: int = Field(default=Limits.max_deliveries, ge=1)
    """A batch whose training was begun and lost, or whose server ended while scoring it, so often is dead."""
    retention_days: float = Field(default=30, gt=0)
    """How long the id of a settled batch is remembered, so that uploading it again is harmless."""

    @property
    def limits(self) -> Limits:
        return Limits(
            max_batches=self.max_batches,
            max_batches_per_run=self.max_batches_per_run,
            max_bytes=self.max_mib * _MIB,
            max_bytes_per_run=self.max_mib_per_run * _MIB,
            max_in_flight=self.max_in_flight,
            max_in_flight_per_run=self.max_in_flight_per_run,
            max_deliveries=self.max_deliveries,
        )


class ServeConfig(BaseSettings):
    """Serve a frozen reference model: score uploaded batches, queue them durably, lease them to trainers."""

    model_config = settings_config("REF_SERVER_")

    config: Path | None = None
    """TOML file with any of these settings."""
    model: str | None = Field(default=None, min_length=1)
    """Directory or hub id of a Hugging Face causal LM."""
    no_model: CliToggleFlag[bool] = False
    """Serve the queue alone: batches are leased as they were uploaded."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda:0, …"""
    dtype: Dtype = "auto"
    """Precision of the weights; auto takes what the model was saved in."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for scoring; PyTorch's choice when not given."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs --insecure."""
    port: int = Field(default=8400, ge=1, le=65535)
    """Port to listen on."""
    insecure: bool = False
    """Listen beyond loopback although anyone who reaches the port can then read and write the queue."""
    data_dir: Path = Path(".tandem")
    """Where the queue is kept, unless it is on PostgreSQL. A restart from the same folder finds it."""
    store: str = "sqlite"
    """sqlite keeps the queue in data_dir; postgresql://USER@HOST/DATABASE shares one queue among several servers."""
    max_batch_tokens: int = Field(default=131_072, ge=2)
    """Largest batch that is admitted, in tokens: the prompt once and all completions."""
    max_body_mib: int = Field(default=64, ge=1)
    """Largest request body, in MiB."""
    scoring_tokens: int = Field(default=16_384, ge=1)
    """Tokens of several small batches that are scored in one forward."""
    queue: QueueConfig = QueueConfig()

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, store: str) -> str:
        if store == "sqlite":
            return store
        if not store.startswith(("postgresql://", "postgres://")):
            raise ValueError("must be sqlite or postgresql://USER@HOST/DATABASE")
        try:
            conninfo_to_dict(store)
        except psycopg.Error as error:
            raise ValueError(f"is not a URL that PostgreSQL takes: {error}") from None
        return store

    @model_validator(mode="after")
    def _model_or_none(self) -> "ServeConfig":
        if (self.model is None) != self.no_model:
            raise ValueError("give either --model PATH_OR_HUB_ID, or --no-model for a queue that scores nothing")
        return self

    @model_validator(mode="after")
    def _largest_body_fits_the_queue(self) -> "ServeConfig":
        room = min(self.queue.max_mib, self.queue.max_mib_per_run)
        if self.max_body_mib > room:
            raise ValueError(
                f"max_body_mib: {self.max_body_mib} is more than the queue ever has room for ({room}); "
                "lower it, or raise queue.max_mib and queue.max_mib_per_run"
            )
        return self

    @model_validator(mode="after")
    def _listen_on_loopback(self) -> "ServeConfig":
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} is reachable by others and requests are not authenticated; "
                "listen on 127.0.0.1 (a tunnel reaches it from elsewhere) or add --insecure"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
