"""The settings of a worker that has no config.toml: the trainer publishes them with its weights."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from policy_trainer.config import ENV_PREFIX, INLINE, RolloutConfig
from policy_trainer.config.worker_settings import refused_settings, trains_adapters, travelling_settings
from policy_trainer.processes.lifecycle.timing import Patience
from shared.atomic_files import write_text
from shared.client import ClientError, RefServerClient
from shared.client.credentials import remedy
from shared.errors import UserError
from shared.settings import from_values
from shared.settings.names import unknown_names, without
from shared.spelling import spell_option

_POLL_SECONDS = 20.0


def published_settings(given: Mapping[str, Any]) -> Path | None:
    """A file with the run's settings for workers, for one that is not given a file; its model is published weights, or
    the one that the published adapters are for.

    Waits until the trainer has published. given: what the command line and the environment say, which wins. A worker
    that names its model looks for weights in the run's directory, unless it says weights = server, too.
    Raises UserError.
    """
    place = given.get("weights", "directory" if "model" in given else "server")
    if place != "server" or given.get("config") is not None:
        return None
    # Workers of several runs may start in one directory.
    defaults = {"model": "MODEL", "run_dir": Path("runs", given.get("run", "default"))}
    # Without settings that are published: those of a task cannot be checked before its name is known.
    local = {name: value for name, value in given.items() if name not in travelling_settings(given)}
    config = from_values(RolloutConfig, **{**defaults, **local, "weights": place})
    if config.server == INLINE:
        raise UserError(
            "server: without --config RUN_DIR/config.toml give the URL of the reference server that has the run's "
            "weights, and --run NAME"
        )
    if config.sampler_traits.server and "model" not in given:
        raise UserError(
            "model: the vLLM server has a name for it",
            "give --model with that name, and --weights server, since a worker with a model looks for weights in the "
            "run's directory",
        )
    try:
        return _write(config, _fetch(config, given))
    except ClientError as error:
        raise UserError(f"server: {error}", remedy(error, ENV_PREFIX)) from None


def _fetch(config: RolloutConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    from policy_trainer.rollout.outbox import worker_directory
    from policy_trainer.trainer.queue_client.server import connect  # late: only this way of starting needs them
    from policy_trainer.weights.published.download import fetch
    from policy_trainer.weights.published.publisher import SETTINGS

    patience = Patience()

    def waiting(reason: str, seconds: float) -> None:
        if patience.is_over(seconds):
            print(f"policy-trainer rollout: waiting {seconds:.0f} s: {reason}", file=sys.stderr)

    with connect(config, config.server, waiting) as client:
        while True:
            newest = _newest(client, config.run, waiting)
            published = newest.words.get(SETTINGS)
            if not isinstance(published, dict):
                raise UserError(
                    f"run: the weights of run {config.run!r} came without settings for workers", "give --config"
                )
            settings = travelling_settings(_known(published))
            _check_trusted(config, settings, given)
            if "model" not in given:
                _check_base(config.run, settings)
            model = fetch(client, newest, worker_directory(config) / "weights")
            if model is None:
                continue
            return {"model": str(model), **settings, "weights": "server", "run_dir": str(config.run_dir)}


def _known(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """The published settings that this version of the program has; prints the names of the others."""
    unknown = list(unknown_names(published, RolloutConfig))
    for name in unknown:
        published = without(published, name)
    if unknown:
        print(
            f"policy-trainer rollout: ignoring published settings that this version does not have: {_short(unknown)}",
            file=sys.stderr,
        )
    return published


def _check_trusted(config: RolloutConfig, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises UserError for published settings that could name code, files or hosts, unless the worker's own
    configuration replaces them. With trust_settings it raises only if a secret would be sent to a published host."""
    foreign = {name: value for name, value in refused_settings(settings) if not _gives(given, name)}
    if foreign and not config.trust_settings:
        raise UserError(
            "run: a worker takes settings that can name code, files or hosts only from its own configuration. "
            f"Run {config.run!r} publishes:\n"
            + "\n".join(f"  {name} = {_short(value)}: give {_option(name)}" for name, value in foreign.items()),
            "or add --trust-settings, if you trust everyone who may publish weights of this run to execute code on "
            "this machine",
        )
    from policy_trainer.rewards.http_reward import SCHEMES, TOKEN_VARIABLE

    hosts = [name for name in foreign.get("rewards", ()) if str(name).startswith(SCHEMES)]
    if hosts and os.environ.get(TOKEN_VARIABLE):
        raise UserError(
            f"rewards: {_short(hosts[0])} is published by run {config.run!r}, but {TOKEN_VARIABLE} is sent only to "
            "servers that this worker's own settings name",
            f"give --rewards, or unset {TOKEN_VARIABLE}",
        )


def _gives(given: Any, name: str) -> bool:
    """Whether these nested tables contain the setting with this dotted name. A list is always given as a whole."""
    for part in name.split("."):
        if isinstance(given, list):
            return True
        if not isinstance(given, Mapping) or part not in given:
            return False
        given = given[part]
    return True


def _option(name: str) -> str:
    """The command-line option for a setting. For a setting inside a list it is the option of the whole list."""
    option = spell_option(re.split(r"\.\d+\.", name)[0])
    return f"{option} and --weights server" if name == "model" else option


def _short(value: Any) -> str:
    text = json.dumps(value)  # ASCII, so that it cannot control the terminal
    return text if len(text) <= 200 else f"{text[:197]}..."


def _check_base(run: str, settings: Mapping[str, Any]) -> None:
    """Raises UserError where the run publishes adapters of a model that this machine lacks."""
    base = str(settings.get("model", ""))
    if trains_adapters(settings) and Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"model: run {run!r} trains adapters of {base}, which is not on this machine: copy that model here, and "
            "give --model with its directory, and --weights server"
        )


def _newest(client: RefServerClient, run: str, waiting: Callable[[str, float], None]) -> Any:
    began = time.monotonic()
    while (newest := client.newest_weights(run, wait_seconds=_POLL_SECONDS)) is None:
        waiting(f"the trainer has not published weights of run {run!r} on the server yet", time.monotonic() - began)
    return newest


def _write(config: RolloutConfig, settings: dict[str, Any]) -> Path:
    from policy_trainer.rollout.outbox import worker_directory

    path = worker_directory(config) / "settings.toml"
    try:
        write_text(path, tomli_w.dumps(settings))
    except TypeError as error:  # TOML has no null
        raise UserError(f"run: the settings that run {config.run!r} publishes cannot be used: {error}") from None
    return path
