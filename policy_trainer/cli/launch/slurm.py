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
_ROLES = ("upload", "train", "admin")
_PRIVATE = 0o600


def launch(arguments: list[str]) -> int:
    """Writes the scripts, and submits them unless --dry-run is given. Raises UserError for what cannot be launched."""
    options, of_train = _parser().parse_known_args(arguments)
    config = read_settings(TrainConfig, of_train, "train")
    directory = RunDirectory(config.run_dir)
    scripts = directory.root.resolve() / "slurm"
    _refuse(config, scripts)
    if not options.dry_run and shutil.which("sbatch") is None:
        raise UserError("launch: sbatch is not on PATH", "use a login node of the cluster, or --dry-run")
    directory.check(config, resume=config.resume)
    scripts.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_tokens(scripts, config.run)
    for name, text in _render(config, options, of_train, scripts).items():
        write_text(scripts / name, text)
    submit = f"bash {shlex.quote(str(scripts / _SUBMIT))}"
    if options.dry_run:
        print(f"{scripts}: {', '.join(_SCRIPTS)}\nto submit them: {submit}")
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
    parser.add_argument("--slurm", action="store_true", required=True, help="by sbatch")
    parser.add_argument("--dry-run", action="store_true", help="only write the scripts")
    parser.add_argument("--nodes", metavar="N", type=_count(1), default=1, help="nodes of the trainer; default: 1")
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=_count(0), default=1,
        help="GPUs of each of these nodes, a rank for each; 0: all jobs run on CPUs; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="N", type=_count(1), default=1,
        help="rollout workers, an array of jobs with a GPU each, or vllm.tensor_parallel_size GPUs; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], type=_sbatch_option,
        help="an option of sbatch for all jobs, such as --sbatch=--time=24:00:00; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--worker-sbatch", metavar="OPTION", action="append", default=[], type=_sbatch_option,
        help="the same for the workers only, such as --worker-sbatch=--partition=preemptible",
    )  # fmt: skip
    return parser


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"must be a number from {least}, got {text!r}")
        return int(text)

    return count


def _sbatch_option(text: str) -> str:
    if not text.startswith("-") or len(text.splitlines()) != 1:
        raise ArgumentTypeError(f"must be an option, as in --sbatch=--partition=gpu, got {text!r}")
    return text


def _refuse(config: TrainConfig, scripts: Path) -> None:
    """Raises UserError for settings that the jobs set themselves, or that do not suit them.

    The config.toml of a run that was launched before has its server and token.
    """
    earlier = (scripts / "server.url").read_text().strip() if (scripts / "server.url").exists() else INLINE
    if not re.fullmatch(PLAIN_NAME, config.run, re.ASCII):
        raise UserError(
            f"run: jobs and tokens are named after it, got {config.run!r}",
            f"set {spell_setting('run')}, of letters, digits, '.', '_' and '-'",
        )
    if config.server not in (INLINE, earlier):
        raise UserError("server: `launch` starts the reference server", "leave it out")
    if config.weights != "directory":
        raise UserError("weights: the jobs read them from RUN_DIR", "leave it out")
    if config.token is not None or (config.token_file is not None and config.token_file.parent != scripts):
        raise UserError("token: `launch` makes a token for each job", "leave token and token_file out")
    if config.sampler_traits.server:
        raise UserError(
            "sampler: the workers' jobs start no `vllm serve`",
            f"use {spell_setting('sampler', 'vllm')}, which samples in the workers' processes",
        )


def _write_tokens(directory: Path, run: str) -> None:
    """A token for each role: `tokens` for the server, ROLE.token for a client. Those of workers and trainer are valid
    for this run only. Tokens of an earlier launch stay valid."""
    if (directory / "tokens").exists():
        return
    tokens = {role: secrets.token_urlsafe(32) for role in _ROLES}
    for role, token in tokens.items():
        write_text(directory / f"{role}.token", f"{token}\n", mode=_PRIVATE)
    bound = {role: "" if role == "admin" else f" run={run}" for role in _ROLES}
    lines = [f"{role} {token} name={role}{bound[role]}\n" for role, token in tokens.items()]
    write_text(directory / "tokens", "".join(lines), mode=_PRIVATE)


def _render(config: TrainConfig, options: Namespace, of_train: list[str], directory: Path) -> Mapping[str, str]:
    """The text of each script. Raises UserError if the model cannot be read."""
    from policy_trainer.trainer.reference_servers import serve_options  # late, since it loads PyTorch
    from shared.models import load_outline

    snapshots = config.reference.snapshot_root or RunDirectory(config.run_dir.resolve()).snapshots
    of_snapshots = ["--reference.snapshot-root", str(snapshots)] if config.reference.sync_steps else []
    serve = serve_options(config, load_outline(config.model, revision=config.revision))
    scores = "--no-model" not in serve
    tensor_parallel = config.vllm.tensor_parallel_size if config.sampler_traits.takes_first_gpus else 1
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
        "directory": directory,
        "output": str(directory).replace("%", "%%"),
        "run_dir": config.run_dir.resolve(),
        "serve": shlex.join([*serve, *(["--snapshot-root", str(snapshots)] if of_snapshots else [])]),
        "train": shlex.join([*of_train, *of_snapshots]),
        "role": "admin" if of_snapshots else "train",
        "nodes": options.nodes,
        "gpus": options.gpus_per_node,
        "ranks": options.nodes * max(1, options.gpus_per_node),
        "server_gpus": int(scores and options.gpus_per_node > 0),
        "worker_gpus": tensor_parallel if options.gpus_per_node else 0,
        "workers": options.workers,
        "sbatch": options.sbatch,
        "worker_sbatch": [*options.sbatch, *options.worker_sbatch],
    }
    return {name: environment.get_template(name).render(values) for name in _SCRIPTS}
