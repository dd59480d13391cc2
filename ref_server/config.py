"""What `ref-server serve` can be told, by file, environment (`REF_SERVER_…`) or command line."""

from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings

from shared.settings import Dtype, settings_config


class QueueConfig(BaseModel):
    """How much may wait. A full queue answers 429, and workers wait."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_batches: int = Field(default=10_000, ge=1)
    """Batches that may wait in all runs together."""
    max_batches_per_run: int = Field(default=10_000, ge=1)
    """Batches that may wait in one run."""
    max_mib: int = Field(default=4096, ge=1)
    """MiB of payload that may wait in all."""
    max_deliveries: int = Field(default=5, ge=1)
    """A batch whose training was begun and lost so many times is set aside as dead."""
    retention_days: float = Field(default=30, gt=0)
    """How long the id of a settled batch is remembered, so that uploading it again is harmless."""


class ServeConfig(BaseSettings):
    """Serve a frozen reference model: score uploaded batches, queue them durably, lease them to trainers."""

    model_config = settings_config("REF_SERVER_")

    config: Path | None = None
    """TOML file with any of these settings."""
    model: str = Field(min_length=1)
    """Directory or hub id of a Hugging Face causal LM."""
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
    """Where the queue is kept. A restart from the same folder finds it."""
    max_batch_tokens: int = Field(default=131_072, ge=2)
    """Largest batch that is admitted, in tokens: the prompt once and all completions."""
    max_body_mib: int = Field(default=64, ge=1)
    """Largest request body, in MiB."""
    scoring_tokens: int = Field(default=16_384, ge=1)
    """Tokens of several small batches that are scored in one forward."""
    queue: QueueConfig = QueueConfig()

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
