"""A run as jobs of Slurm, which share its directory and this Python environment."""

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from policy_trainer.cli.launch.cluster import Cluster, option
from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.run_files.run_directory import config_text
from shared.api import PLAIN_NAME
from shared.errors import UserError
from shared.spelling import spell_setting

_SUBMIT = "submit.sh"
_SCRIPTS = ("job.sh", "server.sbatch", "trainer.sbatch", "workers.sbatch", _SUBMIT)
_VLLM = ("vllm", "serve")
_JOBS = ("server", "trainer", "workers")


class Slurm(Cluster):
    name = "slurm"
    title = "Slurm"
    program = "sbatch"
    remedy = "use a login node of the cluster"

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        of_all = "an option of sbatch for all jobs, as in --sbatch=--time=24:00:00; may be repeated"
        helps = {"--sbatch": of_all} | {f"--{job}-sbatch": f"the same for the {job} only" for job in _JOBS}
        group = parser.add_argument_group("with --slurm", "all nodes share RUN_DIR and this Python environment")
        for name, text in helps.items():
            group.add_argument(
                name, metavar="OPTION", action="append", default=[], type=option("--sbatch=--partition=gpu"), help=text
            )
        group.add_argument(
            "--vllm-command", metavar="COMMAND", type=shlex.split,
            help="with --sampler vllm-server: what starts a worker's vLLM, as in '/envs/vllm/bin/vllm serve'; "
            "default: vllm serve",
        )  # fmt: skip

    def refuse(self) -> None:
        if not re.fullmatch(PLAIN_NAME, self.given.run, re.ASCII):
            raise UserError(
                f"run: jobs and tokens are named after it, got {self.given.run!r}",
                f"set {spell_setting('run')}, of letters, digits, '.', '_' and '-'",
            )
        self.directory.check(self.given, resume=self.given.resume)

    def of_the_jobs(self) -> TrainConfig:
        reference = self.given.reference
        renews, root = reference.sync_steps > 0, reference.snapshot_root or self.directory.snapshots
        return self.given.model_copy(
            update={
                "run_dir": self.directory.root,
                "server": INLINE,  # the job knows its URL
                "rollout": "external",
                "token_file": self.files / self.trainer_token,
                "reference": reference.model_copy(update={"snapshot_root": root if renews else None}),
            }
        )

    def render(self, config: TrainConfig, tokens: Mapping[str, str]) -> Mapping[str, str]:
        from shared.models import load_outline  # late, since it loads PyTorch

        options = self.options
        outline = load_outline(config.model, revision=config.revision)
        serve, vllm = self.serve(config, outline), self.vllm(config, outline)
        if config.reference.snapshot_root is not None:
            serve += ["--snapshot-root", str(config.reference.snapshot_root)]
        values = {
            "run": config.run,
            "working_directory": Path.cwd(),
            "programs": Path(sys.executable).parent,
            "directory": self.files,
            "output": str(self.files).replace("%", "%%"),
            "run_dir": self.directory.root,
            "serve": shlex.join(serve),
            "nodes": options.nodes,
            "ranks": options.nodes * max(1, options.gpus_per_node),
            "workers": options.workers,
            "vllm": vllm and shlex.join(["env", *vllm.variables, *(options.vllm_command or _VLLM), *vllm.arguments]),
            "gpus": self.gpus(config, serve),
            "sbatch": {job: [*options.sbatch, *getattr(options, f"{job}_sbatch")] for job in _JOBS},
        }
        return {"config.toml": config_text(config)} | self.fill_in(_SCRIPTS, values)

    def write(self, texts: Mapping[str, str]) -> None:
        if not self.given.resume:
            self.directory.config.unlink(missing_ok=True)  # of a run that failed before its first step
        super().write(texts)

    @property
    def commands(self) -> Sequence[Sequence[str | Path]]:
        return [["bash", self.files / _SUBMIT]]
