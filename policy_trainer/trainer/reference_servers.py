"""The reference server of a trainer: one that it starts itself, or one that the user names."""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.processes.children import Child, RestartedChild
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.rollout.sampling.sampler import training_params
from policy_trainer.run_files.locks import hold
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import choose_token, read_port, server_file, write_address
from policy_trainer.trainer.parts import max_waiting
from policy_trainer.trainer.queue_client.server import configured_token
from shared.client.retry import OnWait
from shared.devices import choose_device
from shared.logprobs import vision_of
from shared.spelling import spell_name, spell_setting

# After a server has run for this long, its earlier deaths no longer count.
_LASTING_SECONDS = 300.0
# A server whose trainer was killed finishes what it scores: ref-server's --drain-seconds, and a little.
_PREDECESSOR_SECONDS = 40.0
# The client accepts no response above 2 GiB. Prompts with larger tensors are left out.
_MOST_IMAGE_MIB = 1024
# Upper bound of a batch's bytes for each token: its id, log-probs and masks.
_TOKEN_BYTES = 64
# Of each token of a sampling mask.
_KEPT_BYTES = 4
# Interval for checking the server's process, also while waiting for its first answer.
_LOOK_SECONDS = 0.2


class ReferenceServer:
    """A server that the user starts and restarts.

    url: where it listens; known once it is started. snapshot_root: directory of the snapshots that replace its model,
    if there is one.
    """

    def __init__(self, url: str, snapshot_root: Path | None) -> None:
        self.url = url
        self.snapshot_root = snapshot_root

    def start(self, on_wait: OnWait, policy: PreTrainedModel | None = None) -> None:
        """on_wait: called while waiting; it may raise to stop. policy: its shapes determine how large batches with
        pictures become; None if there are none."""

    def await_answer(self, on_wait: OnWait) -> None:
        """Returns once a server that the trainer started has answered. on_wait: called meanwhile; may raise to stop."""

    def check(self) -> None:
        """Restarts a dead server that the trainer started. Called while the server does not answer, by any thread."""

    def describe(self, reason: str) -> str:
        """What the trainer waits for, and what may help. reason: why a request has failed."""
        return reason

    def begin_to_stop(self) -> None:
        """Starts to shut the server down, so that it ends while the caller stops other processes."""

    def stop(self) -> None:
        pass


def choose_server(
    config: TrainConfig,
    directory: RunDirectory,
    note: Callable[[str], None],
    *,
    on_terminal: bool = False,
    forks: ForkServer | None = None,
) -> ReferenceServer:
    """on_terminal: whether notes are shown on a terminal. Elsewhere, as in a log file, they contain no token. forks:
    starts the server."""
    if config.server == INLINE:
        return InlineServer(config, directory, note, on_terminal, forks)
    # Snapshots are uploaded to a server that shares no directory, so the trainer may write them into its own.
    root = directory.snapshots if config.weights == "server" else None
    return ReferenceServer(config.server, config.reference.snapshot_root or root)


class InlineServer(ReferenceServer):
    """`ref-server serve` as a child process: on this machine only, with its queue and its log in the run's directory.

    It has the model that the policy began as, the teacher, or both. It is restarted when it dies, unless it never
    answered. The listening socket is the trainer's: no other process can take the port, and requests wait in it while
    the server starts.
    """

    def __init__(
        self,
        config: TrainConfig,
        directory: RunDirectory,
        note: Callable[[str], None],
        on_terminal: bool,
        forks: ForkServer | None,
    ) -> None:
        super().__init__("", config.reference.snapshot_root or directory.snapshots)
        self._config = config
        self._directory = directory
        self._note = note
        self._on_terminal = on_terminal
        self._forks = forks
        self._log = directory.logs / "ref_server.log"
        self._lock: IO[bytes] | None = None
        self._socket: socket.socket | None = None
        self._process: RestartedChild | None = None
        self._answered = False
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="reference server", daemon=True)

    def start(self, on_wait: OnWait, policy: PreTrainedModel | None = None) -> None:
        """Raises UserError for an unusable token, or if the server of an earlier trainer does not end."""
        config = self._config
        data = self._directory.root / "server"
        self._lock = _hold(data, on_wait)
        self._socket = _listen(read_port(self._directory))
        port, fd = self._socket.getsockname()[1], self._socket.fileno()
        configured = configured_token(config)
        token = configured or choose_token(self._directory, port)
        self.url = write_address(self._directory, port, None if configured else token)
        device = reference_device(config.reference.device, config.device)
        command = [
            "serve", *serve_options(config, policy), "--device", device, "--port", str(port), "--fd", str(fd),
            "--data-dir", str(data), "--snapshot-root", str(self.snapshot_root),
        ]  # fmt: skip
        secret = {"REF_SERVER_TOKEN": token}
        kept = self._lock.fileno(), fd
        child = Child("reference server", "ref_server", command, self._log, secret, kept, self._forks)
        self._process = RestartedChild(child, self._note, lasting=_LASTING_SECONDS)
        self._process.start()
        self._supervisor.start()
        if configured:
            dashboard = self.url
        elif self._on_terminal:
            dashboard = f"{self.url}/#token={token}"
        else:
            dashboard = f"{self.url} (its token is in {server_file(self._directory)})"
        self._note(f"reference server: process {self._process.pid}, on {device}; its dashboard: {dashboard}")

    def await_answer(self, on_wait: OnWait) -> None:
        """Raises RunFailed if the server died first."""
        began = time.monotonic()
        with socket.socket() as probe:
            with suppress(ConnectionError):  # the server died, and `check` raises
                probe.connect(("127.0.0.1", urlsplit(self.url).port))
                probe.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = select.poll()
            answer.register(probe, select.POLLIN)
            while not answer.poll(1000 * _LOOK_SECONDS):
                on_wait("it has not answered yet", time.monotonic() - began)
        self.check()
        self._answered = True

    def check(self) -> None:
        """Raises RunFailed if the server died before it ever answered, or too often."""
        if self._failure is not None:
            raise self._failure
        if self._process is None:
            return
        if not self._answered and (exit_report := self._process.exit_report):
            raise RunFailed(f"{exit_report}\nall of it is in {self._log}")
        self._process.check()

    def _supervise(self) -> None:
        """Restarts a dead server: requests that wait in the socket would only notice when they time out."""
        while not self._stopped.wait(_LOOK_SECONDS):
            try:
                self.check()
            except Exception as error:  # RunFailed, or a process cannot be started
                self._failure = error
                assert self._socket is not None
                self._socket.close()  # requests that wait fail now, and then call `check`
                return

    def describe(self, reason: str) -> str:
        if not self._answered:
            models = _models(self._config).values()
            work = f"loads {' and '.join(models)}" if models else "opens its queue"
            reason = f"the reference server (process {self._process.pid if self._process else '-'}) {work}"
        return f"{reason}; its log is {self._log}"

    def begin_to_stop(self) -> None:
        self._stopped.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        self.begin_to_stop()
        if self._process is not None:
            self._process.stop()
        for resource in (self._socket, self._lock):
            if resource is not None:
                resource.close()


def reference_device(reference: str, policy: str) -> str:
    """Where the reference runs if it is `auto`: on the last GPU that is not the policy's, else where the policy is."""
    if reference != "auto":
        return reference
    device = choose_device(policy)
    others = [index for index in range(torch.cuda.device_count()) if index != (device.index or 0)]
    return f"cuda:{others[-1]}" if device.type == "cuda" and others else str(device)


def serve_options(config: TrainConfig, policy: PreTrainedModel | None) -> list[str]:
    """Options of `ref-server serve` for a run: what it scores with, and limits that admit the run's batches.

    policy: its shapes determine how large batches with pictures become; None if there are none."""
    size = config.sampling.num_generations
    completions = size * config.sampling.max_completion_length
    prompts = size if config.environment else 1  # `reset` may return different texts
    return [
        *_served(config), "--dtype", config.dtype,
        "--max-batch-tokens", str(prompts * config.data.max_prompt_length + completions),
        *(["--scoring-tokens", "1"] if config.max_lag == 0 else []),  # each batch by itself: always the same bits
        *([] if config.threads is None else ["--threads", str(config.threads)]),
        *_limits(config, policy),
    ]  # fmt: skip


def _models(config: TrainConfig) -> dict[str, str]:
    """The models that the server scores with, by its options. Without a reference the teacher is its --model."""
    if not config.serves_first_policy:
        return {} if config.teacher is None else {"--model": config.teacher}
    return {"--model": config.model} | ({} if config.teacher is None else {"--teacher": config.teacher})


def _served(config: TrainConfig) -> list[str]:
    """Without any model to score with, the server is only the queue."""
    if not (models := _models(config)):
        return ["--no-model"]
    revision = ["--revision", config.revision] if config.revision and config.serves_first_policy else []
    return [*chain(*models.items()), *revision]


def _limits(config: TrainConfig, policy: PreTrainedModel | None) -> list[str]:
    """Options for a server that accepts the run's largest batches with pictures or sampling masks; none where batches
    have neither."""
    vision = None if policy is None else vision_of(policy)
    params = training_params(config)
    kept = params.top_k if params.sampling_masks else 0
    if vision is None and not kept:
        return []
    prompt = config.data.max_prompt_length if policy is None else prompt_limit(policy, config)
    completions = config.sampling.num_generations * config.sampling.max_completion_length
    images = 0 if vision is None else min(_MOST_IMAGE_MIB, _mib(vision.most_bytes(prompt)))
    tokens = _TOKEN_BYTES * (prompt + completions) + _KEPT_BYTES * kept * completions
    body = max(64, images + _mib(tokens))
    queued = max_waiting(config) + 2 * config.groups_per_step  # the batches of two steps may be leased
    return [
        *(["--max-image-mib", str(images)] if images else []),
        "--max-body-mib", str(body), "--max-bodies-mib", str(max(256, 2 * body)),
        "--queue.max-mib", str(max(4096, 2 * body * queued)),  # one run may use half of the queue
    ]  # fmt: skip


def _mib(size: int) -> int:
    return -(-size // 2**20)


def _hold(data: Path, on_wait: OnWait) -> IO[bytes]:
    """Makes the server's directory, for this user only, and locks it. The server inherits the lock, so that it lasts as
    long as the server does.

    Raises UserError when another trainer's server still holds it after _PREDECESSOR_SECONDS.
    """
    problem = f"{spell_name('run_dir')}: the reference server of another trainer still works in {data}"
    remedy = f"wait for that trainer, stop it, or choose another {spell_setting('run_dir')}"
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = f"the reference server of an earlier trainer is still ending its work in {data}"
    return hold(
        data / "process.lock",
        problem,
        remedy,
        seconds=_PREDECESSOR_SECONDS,
        on_wait=lambda waited: on_wait(reason, waited),
    )


def _listen(wanted: int | None) -> socket.socket:
    """Listens at the wanted port if it is free, else at any, so that external workers can keep their URL over a
    restart."""
    for port in (wanted or 0, 0):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise RunFailed("no port of 127.0.0.1 is free for the reference server")
