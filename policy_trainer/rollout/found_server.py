"""The server of a worker whose trainer starts one: its URL is in the run's directory."""

import time

from policy_trainer.config import INLINE, RunConfig
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_url
from shared.client.connection import OnWait

_LOOK_SECONDS = 0.2


def find_server(config: RunConfig, wait: OnWait) -> str:
    """The URL that the settings name, or that of the trainer's own server, for which it waits until wait raises."""
    if config.server != INLINE:
        return config.server
    began = time.monotonic()
    while (url := read_url(RunDirectory(config.run_dir))) is None:
        reason = f"the trainer has not started its reference server: there is no server.json in {config.run_dir} yet"
        wait(reason, time.monotonic() - began)
        time.sleep(_LOOK_SECONDS)
    return url


def stay_with(config: RunConfig, url: str, wait: OnWait) -> OnWait:
    """`wait`, which also raises RunFailed once the trainer's server is at another URL: a port may be taken by another
    program while no trainer runs."""
    if config.server != INLINE:
        return wait

    def check(reason: str, seconds: float) -> None:
        now = read_url(RunDirectory(config.run_dir))
        if now not in (None, url):
            raise RunFailed(f"the trainer's reference server is at {now} now, not at {url}: start this worker again")
        wait(reason, seconds)

    return check
