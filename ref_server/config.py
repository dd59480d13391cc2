"""The settings of `ref-server serve`, from a file, the environment (`REF_SERVER_…`) or the command line."""

import re
from pathlib import Path
from typing import Annotated, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, CliSuppress, CliToggleFlag, CliVariadicArg

from ref_server.access.certificates import check_pair
from ref_server.access.hosts import is_loopback
from ref_server.access.keys import Keys, one_admin, read_keys
from shared.api import LimitsView
from shared.logs import LogFormat, LogLevel
from shared.settings import Dtype, InHelp, settings_config

MIB = 2**20
# A batch is dead after this many failed scorings.
_SCORING_ATTEMPTS = 3
# `balanced` is transformers' word.
DeviceMapName = Literal["replicated", "balanced"]


def _known_store(store: str) -> str:
    if store == "sqlite":
        return store
    if not store.startswith(("postgresql://", "postgres://")):
        raise ValueError("must be sqlite or postgresql://USER@HOST/DATABASE")
    if not _is_conninfo(store):
        raise ValueError("is not a URL that PostgreSQL takes; write a password's @ and / as %40 and %2F, and so on")
    return store


# sqlite, or the URL of a database; settings with it must not be repeated, since it may hold a password.
StoreUrl = Annotated[str, AfterValidator(_known_store)]


class QueueConfig(BaseModel):
    """Limits of waiting and of leased batches. A full queue answers 429, and clients wait."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_batches: int = Field(default=10_000, ge=2)
    """Batches that may wait in all runs together. Of this limit and the next two, a run may use at most as much as it
    leaves free: half if it is the only run, a third each if there are two. All runs of a token together get at most
    three quarters."""
    max_batches_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the batches that wait in one run."""
    max_mib: int = Field(default=4096, ge=2)
    """MiB of payload that may wait in all."""
    max_mib_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the MiB of payload that wait in one run."""
    max_stored_mib: int | None = Field(default=None, ge=2)
    """MiB of payload that are stored in total, whatever the state of their batches; by default twice max_mib. Beyond it
    payloads of dead and expired batches are deleted, the longest settled first; of the rest a run may use at most as
    much as it leaves free."""
    min_free_mib: int | None = Field(default=None, ge=0)
    """MiB of data_dir's disk that uploads, also of weights, leave free for acks and other calls that free space. By
    default 256, or a twentieth of a smaller disk; 0 lets uploads fill it. A database's disk is not checked."""
    max_in_flight: int = Field(default=4096, ge=2)
    """Batches that may be leased and not yet acknowledged in all; a trainer checkpoints at half of its run's share."""
    max_in_flight_per_run: int | None = Field(default=None, ge=1)
    """A further bound for the batches of one run that are leased and not yet acknowledged."""
    keep_samples: int = Field(default=256, ge=0)
    """Trained batches of a run that are kept for inspection, out of those that its trainer chose as samples; 0 keeps
    none. Like dead and expired batches they are deleted when space is needed, and after retention_days."""
    max_deliveries: int = Field(default=5, ge=1)
    """A batch is dead after this many failed deliveries, or interrupted scorings (its server ended)."""
    max_waiting_days: float = Field(default=7, gt=0)
    """A batch expires after waiting this many days without any change."""
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
    """The most that the only run may have: at most as much as is free."""
    half = of_all // 2
    return half if bound is None else min(bound, half)


class ServeConfig(BaseSettings):
    """Serve a frozen reference model: score uploaded batches, queue them durably, lease them to trainers."""

    model_config = settings_config("REF_SERVER_")

    config: Annotated[Path | None, InHelp()] = None
    """TOML file with any of these settings."""
    model: Annotated[str | None, InHelp()] = Field(default=None, min_length=1)
    """Directory or hub id of a Hugging Face causal LM."""
    teacher: Annotated[str | None, InHelp()] = Field(default=None, min_length=1)
    """Directory or hub id of a second model of the same vocabulary, which scores each batch too, for distillation:
    teacher_logps."""
    no_model: Annotated[CliToggleFlag[bool], InHelp()] = False
    """Serve only the queue: batches are leased as they were uploaded."""
    tokenizer: Path | None = None
    """Directory with a tokenizer.json, which shows the tokens of a queue without a model as texts."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: Annotated[str, InHelp()] = "auto"
    """Where the model runs: auto (the GPU if there is one, else the CPU), cpu, cuda:0, …"""
    devices: Annotated[CliVariadicArg[list[str]], InHelp()] = []
    """Several devices instead of one: cuda:0 cuda:1."""
    device_map: DeviceMapName = "replicated"
    """What the devices hold. replicated: each has the whole model and scores separate batches. balanced: each has a
    part of one model that is too large for a single GPU."""
    dtype: Annotated[Dtype, InHelp()] = "auto"
    """Precision of the weights; auto: the one that the model was saved in."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for scoring; by default PyTorch's choice."""
    host: Annotated[str, InHelp()] = "127.0.0.1"
    """Address to listen on. Anything but loopback needs tokens, or --insecure."""
    port: Annotated[int, InHelp()] = Field(default=8400, ge=1, le=65535)
    """Port to listen on."""
    fd: int | None = Field(default=None, ge=3)
    """File descriptor of a socket that already listens at host and port, inherited from the parent process."""
    allowed_hosts: list[str] = []
    """Additional names of this server. It always accepts localhost, and beyond loopback also IP addresses and the
    machine's name."""
    token_file: Annotated[Path | None, InHelp()] = None
    """File of tokens: lines ROLE TOKEN, where ROLE is metrics, upload, train or admin, optionally followed by name=NAME
    for the log and run=RUN for the only run that the token is valid for. `#` begins a comment. Reread on SIGHUP."""
    token: CliSuppress[SecretStr | None] = None
    """One admin's token, from the environment or the file only: everyone can see a command line."""
    tls_cert: Path | None = None
    """Serve HTTPS: PEM file of the server's certificate and the intermediate ones."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    insecure: bool = False
    """Listen beyond loopback without tokens. Anyone who reaches the port can then read and write the queue."""
    legacy: CliToggleFlag[bool] = False
    """Also serve Simple-GRPO's generators and trainers, over the byte protocol of its main version."""
    legacy_port: int | None = Field(default=None, ge=1, le=65535)
    """Additional port to listen on: Simple-GRPO's clients have 59875 hard-coded."""
    legacy_insecure: CliToggleFlag[bool] = False
    """Let clients of the Simple-GRPO protocol on this machine in without a token."""
    tinker: CliToggleFlag[bool] = False
    """Also let tinker's client compute log-probs of prompts. Its API key is a token that begins with tml-."""
    data_dir: Annotated[Path, InHelp()] = Path(".tandem")
    """Where published weights are kept, and the queue, unless it is on PostgreSQL. A restart from the same folder finds
    both."""
    store: Annotated[StoreUrl, InHelp()] = Field(default="sqlite", repr=False)  # may hold a password
    """sqlite keeps the queue in data_dir; postgresql://USER@HOST/DATABASE shares one queue among several servers."""
    max_weights_mib: int | None = Field(default=None, ge=1)
    """Maximum MiB of weights in data_dir, published or not yet committed. Default: the free space of its disk beyond
    queue.min_free_mib."""
    max_weights_mib_per_token: int | None = Field(default=None, ge=1)
    """Most MiB of weights that were uploaded with one token. Default: three times what is free."""
    max_batch_tokens: Annotated[int, InHelp()] = Field(default=131_072, ge=2)
    """Largest batch that is admitted, in tokens: the prompt once and all completions."""
    max_body_mib: int = Field(default=64, ge=1)
    """Largest request body, in MiB."""
    max_image_mib: int | None = Field(default=None, ge=0)
    """Most MiB of image tensors in a batch; 0 refuses images. By default max_body_mib: they travel in its body."""
    max_bodies_mib: int = Field(default=256, ge=1)
    """MiB of request bodies in memory at once, except JSON. Beyond it, or if one client would hold more than it leaves
    free, the server answers 429. Checking and storing a body takes up to four more times its length, so five times
    this bounds the memory of uploads."""
    scoring_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens in a forward over several batches and direct requests. A larger batch is scored by itself."""
    snapshot_root: Annotated[Path | None, InHelp()] = None
    """Directory of the snapshots that may replace the reference's weights (PUT /v1/reference). By default none may."""
    drain_seconds: float = Field(default=30, gt=0)
    """Seconds that the server has to finish its work after SIGTERM. The next start resumes what is left."""
    log_format: LogFormat = "console"
    """console: lines for people; json: one object per line, for machines."""
    log_level: LogLevel = "info"
    """Lowest level that is logged: debug (every request), info, warning, error."""
    queue: QueueConfig = QueueConfig()
    _keys: Keys = PrivateAttr(default_factory=Keys)

    @property
    def max_weights(self) -> int | None:
        """max_weights_mib in bytes."""
        return None if self.max_weights_mib is None else self.max_weights_mib * MIB

    @property
    def max_weights_per_token(self) -> int | None:
        """max_weights_mib_per_token in bytes."""
        return None if self.max_weights_mib_per_token is None else self.max_weights_mib_per_token * MIB

    @property
    def max_image_bytes(self) -> int:
        """max_image_mib in bytes."""
        return (self.max_body_mib if self.max_image_mib is None else self.max_image_mib) * MIB

    @field_validator("allowed_hosts")
    @classmethod
    def _names_alone(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ValueError("must be names without scheme and port, as in gpu-box.example")
        return names

    @model_validator(mode="after")
    def _model_or_none(self) -> "ServeConfig":
        if (self.model is None) != self.no_model:
            raise ValueError("give either --model PATH_OR_HUB_ID, or --no-model for a queue that scores nothing")
        if self.tokenizer is not None and not self.no_model:
            raise ValueError("tokenizer: a model has its own; leave it out, or give --no-model")
        if self.teacher is not None and self.no_model:
            raise ValueError("teacher: it needs a --model too: to score with one model only, give it as --model")
        return self

    @model_validator(mode="after")
    def _one_device_or_several(self) -> "ServeConfig":
        if self.devices and self.device != "auto":
            raise ValueError("device and devices exclude each other: give --device cuda:0, or --devices cuda:0 cuda:1")
        if self.device_map == "balanced" and len(set(self.devices)) < 2:
            raise ValueError("device_map: balanced needs at least two devices, as in --devices cuda:0 cuda:1")
        return self

    @property
    def all_devices(self) -> list[str]:
        return self.devices or [self.device]

    @model_validator(mode="after")
    def _largest_body_fits_the_queue(self) -> "ServeConfig":
        room = self.queue.limits.max_bytes_per_run // MIB
        if self.max_body_mib > room:
            raise ValueError(
                f"max_body_mib: {self.max_body_mib} is more than the queue ever has room for in one run "
                f"({room}: at most half of queue.max_mib); lower it, or raise queue.max_mib and queue.max_mib_per_run"
            )
        return self

    @model_validator(mode="after")
    def _images_fit_a_body(self) -> "ServeConfig":
        if self.max_image_bytes > self.max_body_mib * MIB:
            raise ValueError(
                f"max_image_mib: {self.max_image_mib} must be at most max_body_mib ({self.max_body_mib}): images "
                "travel in the body of their batch"
            )
        return self

    @model_validator(mode="after")
    def _bodies_hold_the_largest(self) -> "ServeConfig":
        if self.max_bodies_mib < 2 * self.max_body_mib:
            raise ValueError(
                f"max_bodies_mib: {self.max_bodies_mib} must be at least twice max_body_mib ({self.max_body_mib}): one "
                "client may hold half of it"
            )
        return self

    @model_validator(mode="after")
    def _tokens_can_be_read(self) -> "ServeConfig":
        self.read_tokens()
        return self

    @model_validator(mode="after")
    def _certificate_fits_its_key(self) -> "ServeConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key)
        return self

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> "ServeConfig":
        if not self.insecure and not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} is reachable by others and requests are not authenticated; give tokens "
                "(--token-file, or REF_SERVER_TOKEN in the environment), listen on 127.0.0.1 (a tunnel reaches it "
                "from elsewhere), or add --insecure"
            )
        return self

    @model_validator(mode="after")
    def _legacy_settings_agree(self) -> "ServeConfig":
        if not self.legacy and (self.legacy_port is not None or self.legacy_insecure):
            raise ValueError("legacy_port and legacy_insecure need --legacy")
        if self.legacy_port == self.port:
            raise ValueError(f"legacy_port: {self.port} is the port already; --legacy is served there too")
        if self.legacy and self.no_model:
            raise ValueError("legacy: every batch of the Simple-GRPO protocol is scored, which needs a --model")
        if self.legacy and self.keys and not (self.legacy_insecure and is_loopback(self.host)):
            raise ValueError(
                "legacy: those clients send no token; add --legacy-insecure and listen on 127.0.0.1: then all users of "
                "this machine may use the Simple-GRPO protocol"
            )
        return self

    @model_validator(mode="after")
    def _tinker_scores(self) -> "ServeConfig":
        if self.tinker and self.no_model:
            raise ValueError("tinker: its client computes log-probs, which needs a --model")
        return self

    def read_tokens(self) -> None:
        """Reads the known tokens, perhaps once more. Raises ValueError, and then keeps those it had."""
        keys = Keys()
        try:
            if self.token_file is not None:
                keys |= read_keys(self.token_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"token_file: {error}") from None
        try:
            if self.token is not None:
                keys |= one_admin(self.token.get_secret_value())
        except ValueError as error:
            raise ValueError(f"token: {error}") from None
        self._keys = keys

    @property
    def keys(self) -> Keys:
        """The known tokens. If there are none, requests need no token."""
        return self._keys


def _is_conninfo(url: str) -> bool:
    """Whether PostgreSQL can parse the URL.

    False, too, if part of a password would be read as a host, port or database, since errors would then print it.
    """
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.Error:
        return False
    names = parts.get("host", "") + parts.get("dbname", "")
    return "@" not in names and re.fullmatch("[0-9,]*", parts.get("port", "")) is not None
