"""One worker on each of several devices, as child processes of one command."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from policy_trainer.config import RolloutConfig
from policy_trainer.processes.children import Child, RestartedChild
from policy_trainer.run_files.run_directory import RunDirectory
from shared.devices import choose_device

log = structlog.get_logger()

_LOOK_SECONDS = 0.2
# A worker that has run for this many seconds starts with a new count of failures.
_LASTING_SECONDS = 600.0


def only_visible(device: str) -> tuple[str, dict[str, str]]:
    """The device's name in a process that sees no other GPU, and the environment variables that hide the others: vLLM
    takes the first visible GPU."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device, {}
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return "cuda:0", {"CUDA_VISIBLE_DEVICES": visible[int(number)] if visible else number}


def run_device_workers(config: RolloutConfig, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs the workers `worker`, `worker` + 1, … of `workers`, one for each of `devices`, until all have finished the
    run, and restarts those that die. Ends all of them on an exception, such as Ctrl-C.

    arguments, environment: the command's settings; each child gets them, and its device and number. Raises UserError
    for a missing device, RunFailed for a worker that dies again and again.
    """
    children: list[Child] = []
    for number, name in enumerate(config.devices, start=config.worker):
        device, visible = only_visible(str(choose_device(name)))
        options = ["--devices", device, "--worker", str(number), "--workers", str(config.workers)]
        file = RunDirectory(config.run_dir).logs / f"rollout-{number}.log"
        command = ["rollout", *arguments, *options]
        children.append(Child(f"rollout worker {number}", "policy_trainer", command, file, {**environment, **visible}))
        log.info("starting a worker", worker=number, workers=config.workers, device=name, log=str(file))
    restarted = {child: RestartedChild(child, log.warning, lasting=_LASTING_SECONDS) for child in children}
    try:
        for worker in restarted.values():
            worker.start()
        while unfinished := [worker for child, worker in restarted.items() if child.exit_status != 0]:
            for worker in unfinished:
                worker.check()
            time.sleep(_LOOK_SECONDS)
    finally:
        with ThreadPoolExecutor(len(children)) as pool:
            list(pool.map(Child.stop, children))
