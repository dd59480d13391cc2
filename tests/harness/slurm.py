"""A Slurm of the test's own: a controller and several nodes, which are all this machine."""

import getpass
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.harness.ports import free_port
from tests.harness.processes import until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmMissing(Exception):
    """There is no Slurm on this machine: `apt-get install slurmctld slurmd slurm-client munge` brings one."""


class Slurm:
    """variables: what `sbatch` and its relatives need in their environment."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def call(self, *command: str) -> str:
        """Runs a command of Slurm's and returns its output."""
        environment = {**os.environ, **self.variables}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def states(self) -> dict[str, str]:
        """The state of each job, such as RUNNING; of an array each task, as in 7_0."""
        states = {}
        for line in self.call("scontrol", "show", "job", "--oneliner").splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            array = fields.get("ArrayJobId")
            states[f"{array}_{fields['ArrayTaskId']}" if array else fields["JobId"]] = fields["JobState"]
        return states

    def kill(self, job: str, *variables: str) -> None:
        """Kills the processes of a job at once, as if its node had failed; only those with these variables, if any."""
        _kill({f"SLURM_JOB_ID={job}", *variables})


def _kill(variables: Set[str]) -> None:
    """Kills the processes that began with these variables."""
    wanted = {each.encode() for each in variables}
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has just ended
            if process.name.isdigit() and wanted <= {*(process / "environ").read_bytes().split(b"\0")}:
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def slurm(nodes: int) -> Iterator[Slurm]:
    """A cluster of so many nodes, each with eight CPUs. Raises SlurmMissing."""
    if not all(map(shutil.which, _PROGRAMS)):
        raise SlurmMissing(SlurmMissing.__doc__)
    root = Path(tempfile.mkdtemp(prefix="tandem-slurm-"))
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = root / "slurm.conf"
    hosts = (
        f"NodeName=node{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=8" for n in range(nodes)
    )
    values = {"port": free_port(), "root": root, "user": getpass.getuser(), "nodes": "\n".join(hosts)}
    configuration.write_text(_CONFIGURATION.format_map(values))
    cluster = Slurm({"SLURM_CONF": str(configuration)})
    files = (f"--{name}={root}/munge.{name.removesuffix('-file')}" for name in ("key-file", "pid-file", "log-file"))
    daemons = [
        ["munged", "--foreground", "--force", *files, f"--socket={root}/munge.socket", f"--seed-file={root}/seed"],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"node{n}"] for n in range(nodes)),
    ]
    started = []
    try:
        for daemon in daemons:
            with (root / f"{daemon[0]}.log").open("a") as log:
                environment = {**os.environ, **cluster.variables}
                started.append(subprocess.Popen(daemon, env=environment, stdout=log, stderr=subprocess.STDOUT))
        until(lambda: _idle(cluster) == nodes, "the nodes of Slurm")
        yield cluster
    finally:
        _kill({f"SLURM_CONF={configuration}"})  # the daemons, the steps of jobs, and what runs in them
        for process in started:
            process.wait()
        shutil.rmtree(root, ignore_errors=True)


def _idle(cluster: Slurm) -> int:
    """Nodes without jobs."""
    try:
        return int(cluster.call("sinfo", "--noheader", "--states=idle", "--format=%D") or 0)
    except subprocess.CalledProcessError:
        return 0
