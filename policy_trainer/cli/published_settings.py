"""The settings of a worker that has no config.toml: the trainer publishes them with its weights."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from policy_trainer.config import ENV_PREFIX, INLINE, RolloutConfig
from policy_trainer.config.worker_settings import refused_settings, trains_adapters, travelling_settings
from policy_trainer.lifecycle.waits import Patience
from shared.atomic_files import write_text
from shared.client import ClientError, RefServerClient
from shared.client.credentials import remedy
from shared.errors import UserError
from shared.settings import from_values
from shared.settings.command_line import spell_option
from shared.settings.names import unknown_names, without

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
    # Without what travels: a task's settings cannot be checked before its name has come.
    local = {name: value for name, value in said.items() if name not in travelling_settings(said)}
    asked = from_values(RolloutConfig, **{**own, **local, "weights": place})
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
        return _write(asked, _fetch(asked, said))
    except ClientError as error:
        raise UserError(f"server: {error}{remedy(error, ENV_PREFIX)}") from None


def _fetch(asked: RolloutConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    from policy_trainer.queue_client.server import connect  # late: only this way of starting needs them
    from policy_trainer.rollout.own_directory import own_directory
    from policy_trainer.weights.download import Gone, fetch
    from policy_trainer.weights.upload import SETTINGS

    waiting = _Waiting()
    with connect(asked, asked.server, waiting) as client:
        while True:
            found = _newest(client, asked.run, waiting)
            published = found.words.get(SETTINGS)
            if not isinstance(published, dict):
                raise UserError(
                    f"run: the weights of run {asked.run!r} came without settings for workers: give --config"
                )
            settings = travelling_settings(_known(published))
            _check_trusted(asked, settings, said)
            if "model" not in said:
                _check_base(asked.run, settings)
            try:
                model = fetch(client, found, own_directory(asked) / "weights")
            except Gone:
                continue
            return {"model": str(model), **settings, "weights": "server", "run_dir": str(asked.run_dir)}


def _known(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without settings that this version does not have, which it reports."""
    unknown = list(unknown_names(published, RolloutConfig))
    for name in unknown:
        published = without(published, name)
    if unknown:
        print(
            f"policy-trainer rollout: {_short(unknown)} are published, but no settings of this version: left out",
            file=sys.stderr,
        )
    return published


def _check_trusted(asked: RolloutConfig, settings: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Raises UserError for published settings that could name code, files or hosts and that the worker's own
    configuration does not give; with trust_settings only where its secrets would go to a published host."""
    foreign = {name: value for name, value in refused_settings(settings) if not _gives(said, name)}
    if foreign and not asked.trust_settings:
        raise UserError(
            f"run: workers take what can name code, files or hosts from their own settings only. Run {asked.run!r} "
            "publishes:\n"
            + "\n".join(f"  {name} = {_short(value)}: give {_option(name)}" for name, value in foreign.items())
            + "\nOr give --trust-settings, if you trust everybody who may publish weights of this run to execute code "
            "on this machine"
        )
    from policy_trainer.rewards.http_reward import SCHEMES, TOKEN_VARIABLE

    hosts = [name for name in foreign.get("rewards", ()) if str(name).startswith(SCHEMES)]
    if hosts and os.environ.get(TOKEN_VARIABLE):
        raise UserError(
            f"rewards: {_short(hosts[0])} is published by run {asked.run!r}, and {TOKEN_VARIABLE} goes only to servers "
            f"of this worker's own settings: give --rewards, or unset {TOKEN_VARIABLE}"
        )


def _gives(said: Any, name: str) -> bool:
    """Whether nested tables have the setting of this dotted name. A list is given as a whole."""
    for part in name.split("."):
        if isinstance(said, list):
            return True
        if not isinstance(said, Mapping) or part not in said:
            return False
        said = said[part]
    return True


def _option(name: str) -> str:
    """The option that gives a setting; of a setting in a list the list's, since it is given as a whole."""
    option = spell_option(re.split(r"\.\d+\.", name)[0])
    return f"{option} and --weights server" if name == "model" else option


def _short(value: Any) -> str:
    text = json.dumps(value)  # in ASCII: the terminal shall not obey it
    return text if len(text) <= 200 else f"{text[:197]}..."


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
    try:
        write_text(path, tomli_w.dumps(settings))
    except TypeError as error:  # TOML has no null
        raise UserError(f"run: the settings that run {asked.run!r} publishes cannot be used: {error}") from None
    return path


class _Waiting:
    def __init__(self) -> None:
        self._patience = Patience()

    def __call__(self, reason: str, seconds: float) -> None:
        if self._patience.is_over(seconds):
            print(f"policy-trainer rollout: waiting {seconds:.0f} s: {reason}", file=sys.stderr)
