"""A Slurm of the test's own, whose nodes are all this machine, and runs that are launched there."""

import getpass
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from policy_trainer.__main__ import main
from tests.harness.ports import free_port
from tests.harness.processes import until
from tests.harness.runs import steps_of

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


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["policy-trainer", "launch", "--slurm", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    assert not ending.value.code


def submitted(text: str) -> dict[str, str]:
    """The ids of the jobs of each role."""
    return {role: job for job, role in re.findall(r"(\d+) \((\w+)\)", text)}


def logs(directory: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(directory.glob("*.log")))


class Steps:
    """Waits for steps of a run whose jobs log into its directory `slurm`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def more(self, count: int) -> None:
        wanted, ended = len(steps_of(self._run_dir)) + count, self._run_dir / "slurm" / "ended"
        self.until(lambda: len(steps_of(self._run_dir)) >= wanted or ended.exists(), f"{count} steps more")
        assert not ended.exists(), logs(self._run_dir / "slurm")

    def until(self, condition, what: str) -> None:
        try:
            until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{logs(self._run_dir / 'slurm')}") from None
