"""The environment variables of child processes."""

import os
import sys

from shared.process import PARENT_VARIABLE, child_environment

# What torchrun sets for each rank (torch.distributed.elastic of PyTorch 2.11 to 2.13): a child that had these
# would take itself for that rank.
_TORCHRUN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}  # fmt: skip
# Prefix of our own variables. Some hold secrets, and no code of the user's needs them.
_OURS = "TANDEM_"


def in_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment() -> dict[str, str]:
    """For a child: this process's environment without settings, which would override the child's configuration file,
    and under torchrun without the variables of this rank. Threads of PyTorch's that wait leave the core to the other
    processes of the run, unless the user wants them to spin."""
    of_rank = _TORCHRUN if in_torchrun() else set[str]()
    return {"OMP_WAIT_POLICY": "PASSIVE"} | {
        name: value
        for name, value in child_environment().items()
        if name not in of_rank and not name.startswith(("POLICY_TRAINER_", "REF_SERVER_"))
    }


def environment_of_users_code() -> dict[str, str]:
    """For a child that runs only users' code: that of `environment` without our secrets, and with this process's import
    paths."""
    variables = {name: value for name, value in environment().items() if not name.startswith(_OURS)}
    return variables | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
