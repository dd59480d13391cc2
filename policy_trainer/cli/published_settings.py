"""The settings of a worker that has no config.toml: the trainer publishes them with its weights."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from policy_trainer.config import ENV_PREFIX, INLINE, RolloutConfig
from policy_trainer.config.worker_settings import taken, trains_adapters
from policy_trainer.lifecycle.waits import Patience
from shared.atomic_files import write_text
from shared.client import ClientError, RefServerClient
from shared.client.credentials import remedy
from shared.errors import UserError
from shared.settings import from_values

_POLL_SECONDS = 20.0


def published_settings(said: Mapping[str, Any]) -> Path | None:
    """A file with the run's settings for workers, for one that is not given a file; its model is published weights, or
    the one that the published adapters are for.

    Waits until the trainer has published. said: what the command line and the environment say, which wins. A worker
    that names its model looks for weights in the run's directory, unless it says weights = server, too.
    Raises UserError.
    """
    place = said.get("weights", "directory" if "model" in said else "server")
    if place != "server" or said.get("config") is not None:
        return None
    # Workers of several runs may start in one directory.
    own = {"model": "MODEL", "run_dir": Path("runs", said.get("run", "default"))}
    asked = from_values(RolloutConfig, **{**own, **said, "weights": place})
    if asked.server == INLINE:
        raise UserError(
            "server: without --config RUN_DIR/config.toml give the URL of the reference server that has the run's "
            "weights, and --run NAME"
        )
    if asked.sampler == "vllm-server" and "model" not in said:
        raise UserError(
            "model: the vLLM server has a name for it: give --model with that name, and --weights server, since a "
            "worker with a model looks for weights in the run's directory"
        )
    try:
        return _write(asked, _fetch(asked, has_model="model" in said))
    except ClientError as error:
        raise UserError(f"server: {error}{remedy(error, ENV_PREFIX)}") from None


def _fetch(asked: RolloutConfig, *, has_model: bool) -> dict[str, Any]:
    from policy_trainer.queue_client.server import connect  # late: only this way of starting needs them
    from policy_trainer.rollout.own_directory import own_directory
    from policy_trainer.weights.download import Gone, fetch
    from policy_trainer.weights.upload import SETTINGS

    waiting = _Waiting()
    with connect(asked, asked.server, waiting) as client:
        while True:
            found = _newest(client, asked.run, waiting)
            settings = found.words.get(SETTINGS)
            if not isinstance(settings, dict):
                raise UserError(
                    f"run: the weights of run {asked.run!r} came without settings for workers: give --config"
                )
            if not has_model:
                _check_base(asked.run, settings)
            try:
                model = fetch(client, found, own_directory(asked) / "weights")
            except Gone:
                continue
            return {"model": str(model), **taken(settings), "weights": "server", "run_dir": str(asked.run_dir)}


def _check_base(run: str, settings: Mapping[str, Any]) -> None:
    """Raises UserError where the run publishes adapters of a model that this machine lacks."""
    base = str(settings.get("model", ""))
    if trains_adapters(settings) and Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"model: run {run!r} trains adapters of {base}, which is not on this machine: copy that model here, and "
            "give --model with its directory, and --weights server"
        )


def _newest(client: RefServerClient, run: str, waiting: "_Waiting") -> Any:
    began = time.monotonic()
    while (found := client.newest_weights(run, wait_seconds=_POLL_SECONDS)) is None:
        waiting(f"the trainer has not published weights of run {run!r} on the server yet", time.monotonic() - began)
    return found


def _write(asked: RolloutConfig, settings: dict[str, Any]) -> Path:
    from policy_trainer.rollout.own_directory import own_directory

    path = own_directory(asked) / "settings.toml"
    write_text(path, tomli_w.dumps(settings))
    return path


class _Waiting:
    def __init__(self) -> None:
        self._patience = Patience()

    def __call__(self, reason: str, seconds: float) -> None:
        if self._patience.is_over(seconds):
            print(f"policy-trainer rollout: waiting {seconds:.0f} s: {reason}", file=sys.stderr)
