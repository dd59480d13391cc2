"""The command `launch`: a run as jobs of Slurm, which are scripts in RUN_DIR/slurm."""

import re
import secrets
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.api import PLAIN_NAME
from shared.atomic_files import write_text
from shared.errors import UserError
from shared.spelling import spell_setting

_SUBMIT = "submit.sh"
_SCRIPTS = ("job.sh", "server.sbatch", "trainer.sbatch", "workers.sbatch", _SUBMIT)
_JOBS = ("server", "trainer", "workers")
_ROLES = ("upload", "train", "admin")
_PRIVATE = 0o600


def launch(arguments: list[str]) -> int:
    """Writes the scripts, and submits them unless --dry-run is given. Raises UserError for what cannot be launched."""
    options, of_train = _parser().parse_known_args(arguments)
    given = read_settings(TrainConfig, of_train, "train")
    directory = RunDirectory(given.run_dir.resolve())
    scripts = directory.root / "slurm"
    _refuse(given, scripts)
    if not options.dry_run and shutil.which("sbatch") is None:
        raise UserError("launch: sbatch is not on PATH", "use a login node of the cluster, or --dry-run")
    directory.check(given, resume=given.resume)
    config = _of_the_jobs(given, directory, scripts)
    texts = _render(config, options, directory, scripts)
    scripts.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not given.resume:
        directory.config.unlink(missing_ok=True)  # of a run that failed before its first step
    RunDirectory(scripts).write_config(config)
    _write_tokens(scripts, config.run)
    for name, text in texts.items():
        write_text(scripts / name, text)
    if options.dry_run:
        print(f"{scripts}: {', '.join(_SCRIPTS)}\nto submit them: bash {shlex.quote(str(scripts / _SUBMIT))}")
        return 0
    return subprocess.run(["bash", scripts / _SUBMIT], check=False).returncode


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="policy-trainer launch",
        usage="policy-trainer launch --slurm [options] [options of `policy-trainer train`]",
        description="Runs `train` on a cluster: writes scripts for the reference server, the trainer and the rollout "
        "workers into RUN_DIR/slurm and submits them. All nodes share RUN_DIR and this Python environment.",
        epilog="All other options, and --config FILE, are those of `policy-trainer train`.",
        allow_abbrev=False,
    )
    parser.add_argument("--slurm", action="store_true", required=True, help="submit to Slurm (required)")
    parser.add_argument("--dry-run", action="store_true", help="only write the scripts")
    parser.add_argument("--nodes", metavar="N", type=_count(1), default=1, help="nodes of the trainer; default: 1")
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=_count(0), default=1,
        help="GPUs of each of these nodes, with a rank for each; 0 runs all jobs on CPUs; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="N", type=_count(1), default=1,
        help="rollout workers, a job array with a GPU for each; with --sampler vllm vllm.tensor_parallel_size GPUs; "
        "default: 1",
    )  # fmt: skip
    of_all = "an option of sbatch for all jobs, as in --sbatch=--time=24:00:00; may be repeated"
    helps = {"--sbatch": of_all} | {f"--{job}-sbatch": f"the same for the {job} only" for job in _JOBS}
    for name, text in helps.items():
        parser.add_argument(name, metavar="OPTION", action="append", default=[], type=_sbatch_option, help=text)
    return parser


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"must be an integer, at least {least}; got {text!r}")
        return int(text)

    return count


def _sbatch_option(text: str) -> str:
    if not text.startswith("-") or len(text.splitlines()) != 1:
        raise ArgumentTypeError(f"must be an option, as in --sbatch=--partition=gpu, got {text!r}")
    return text


def _refuse(config: TrainConfig, scripts: Path) -> None:
    """Raises UserError for settings that the jobs set themselves, or that do not suit them."""
    if not re.fullmatch(PLAIN_NAME, config.run, re.ASCII):
        raise UserError(
            f"run: jobs and tokens are named after it, got {config.run!r}",
            f"set {spell_setting('run')}, of letters, digits, '.', '_' and '-'",
        )
    # The configuration of a run that was launched before, which --resume reads, has the server and token of its jobs.
    launched = config.token_file is not None and config.token_file.parent == scripts
    if config.server != INLINE and not launched:
        raise UserError("server: `launch` starts the reference server", "leave it out")
    if config.token is not None or (config.token_file is not None and not launched):
        raise UserError("token: `launch` makes a token for each job", "leave token and token_file out")
    if config.weights != "directory":
        raise UserError("weights: the jobs read them from RUN_DIR", "leave it out")
    if config.sampler_traits.server:
        raise UserError(
            "sampler: the workers' jobs start no `vllm serve`",
            f"use {spell_setting('sampler', 'vllm')}, which samples in the workers' processes",
        )


def _of_the_jobs(config: TrainConfig, directory: RunDirectory, scripts: Path) -> TrainConfig:
    """The settings that the trainer's job begins with."""
    renews, root = config.reference.sync_steps > 0, config.reference.snapshot_root or directory.snapshots
    return config.model_copy(
        update={
            "run_dir": directory.root,
            "server": INLINE,  # the job knows its URL
            "rollout": "external",
            "token_file": scripts / f"{'admin' if renews else 'train'}.token",
            "reference": config.reference.model_copy(update={"snapshot_root": root if renews else None}),
        }
    )


def _write_tokens(directory: Path, run: str) -> None:
    """A token for each role: `tokens` for the server, ROLE.token for a client. Those of workers and trainer are valid
    for this run only. Tokens of an earlier launch stay valid."""
    bound, file = f" run={run}", directory / "tokens"
    if file.exists() and f"{bound}\n" in file.read_text():
        return
    tokens = {role: secrets.token_urlsafe(32) for role in _ROLES}
    for role, token in tokens.items():
        write_text(directory / f"{role}.token", f"{token}\n", mode=_PRIVATE)
    lines = [f"{role} {token} name={role}{'' if role == 'admin' else bound}\n" for role, token in tokens.items()]
    write_text(file, "".join(lines), mode=_PRIVATE)


def _render(config: TrainConfig, options: Namespace, directory: RunDirectory, scripts: Path) -> Mapping[str, str]:
    """The text of each script. Raises UserError if the model cannot be read."""
    from policy_trainer.trainer.reference_servers import serve_options  # late, since it loads PyTorch
    from shared.models import load_outline

    serve = serve_options(config, load_outline(config.model, revision=config.revision))
    if config.reference.snapshot_root is not None:
        serve += ["--snapshot-root", str(config.reference.snapshot_root)]
    if config.reference.device != "auto":
        serve += ["--device", config.reference.device]
    per_worker = config.vllm.tensor_parallel_size if config.sampler_traits.takes_first_gpus else 1
    gpus = {"server": int("--no-model" not in serve), "trainer": options.gpus_per_node, "workers": per_worker}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = lambda text: shlex.quote(str(text))
    values = {
        "run": config.run,
        "working_directory": Path.cwd(),
        "programs": Path(sys.executable).parent,
        "directory": scripts,
        "output": str(scripts).replace("%", "%%"),
        "run_dir": directory.root,
        "serve": shlex.join(serve),
        "nodes": options.nodes,
        "ranks": options.nodes * max(1, options.gpus_per_node),
        "workers": options.workers,
        "gpus": gpus if options.gpus_per_node else dict.fromkeys(gpus, 0),
        "sbatch": {job: [*options.sbatch, *getattr(options, f"{job}_sbatch")] for job in _JOBS},
    }
    return {name: environment.get_template(name).render(values) for name in _SCRIPTS}
