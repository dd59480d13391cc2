"""The command `launch`: a run on a cluster. What it submits is in RUN_DIR/slurm or RUN_DIR/kubernetes."""

import secrets
import shlex
import shutil
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from policy_trainer.cli.launch.cluster import Cluster, count, option
from policy_trainer.cli.launch.kubernetes import Kubernetes
from policy_trainer.cli.launch.slurm import Slurm
from policy_trainer.cli.settings import read_settings
from policy_trainer.config import INLINE, TrainConfig
from shared.errors import UserError
from shared.spelling import spell_option, spell_setting

_CLUSTERS: Sequence[type[Cluster]] = (Slurm, Kubernetes)
# Where a worker finds its vLLM server; on Slurm at another port.
_VLLM_URL = "http://127.0.0.1:8000"
_ROLES = ("upload", "train", "admin")


def launch(arguments: list[str]) -> int:
    """Writes the files, and submits them unless --dry-run is given. Raises UserError for what cannot be launched."""
    # The options of the other cluster stay unknown.
    chosen = [cluster for cluster in _CLUSTERS if f"--{cluster.name}" in arguments] or _CLUSTERS
    options, of_train = _parser(chosen).parse_known_args(arguments)
    given = read_settings(TrainConfig, of_train, "train", otherwise={"vllm_url": _VLLM_URL})
    if not given.sampler_traits.server:
        given = given.model_copy(update={"vllm_url": None})
    cluster: Cluster = options.cluster(options, given)
    _refuse(cluster)
    cluster.refuse()
    if not options.dry_run and shutil.which(cluster.program) is None:
        raise UserError(f"launch: {cluster.program} is not on PATH", f"{cluster.remedy}, or use --dry-run")
    config = cluster.of_the_jobs()
    tokens = _tokens(cluster.files, config.run)
    texts = cluster.render(config, tokens)
    cluster.write({**tokens, **texts})
    if not options.dry_run:
        return cluster.submit()
    print(f"{cluster.files}: {', '.join(texts)}\nto submit them:")
    for command in cluster.commands:
        print(f"  {shlex.join(map(str, command))}")
    return 0


def _parser(clusters: Sequence[type[Cluster]]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="policy-trainer launch",
        usage="policy-trainer launch --slurm|--kubernetes [options] [options of `policy-trainer train`]",
        description="Runs `train` on a cluster: writes files for the reference server, the trainer and the rollout "
        "workers into RUN_DIR/slurm or RUN_DIR/kubernetes, and submits them.",
        epilog="All other options, and --config FILE, are those of `policy-trainer train`.",
        allow_abbrev=False,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    for cluster in _CLUSTERS:
        choice.add_argument(
            f"--{cluster.name}", dest="cluster", action="store_const", const=cluster, help=f"submit to {cluster.title}"
        )
    parser.add_argument("--dry-run", action="store_true", help="only write the files")
    parser.add_argument("--nodes", metavar="N", type=count(1), default=1, help="nodes of the trainer; default: 1")
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=count(0), default=1,
        help="GPUs of each of these nodes, with a rank for each; 0 runs everything on CPUs; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="N", type=count(1), default=1,
        help="rollout workers, each with one GPU, or with vLLM on vllm.tensor_parallel_size GPUs; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--vllm-option", metavar="OPTION", action="append", default=[],
        type=option("--vllm-option=--max-num-seqs=64"),
        help="with --sampler vllm-server: a further option of each worker's `vllm serve`, as in "
        "--vllm-option=--max-num-seqs=64; may be repeated",
    )  # fmt: skip
    for cluster in clusters:
        cluster.add_options(parser)
    return parser


def _refuse(cluster: Cluster) -> None:
    """Raises UserError for settings that the jobs set themselves, or that do not suit them."""
    config = cluster.given
    # The configuration of a run that was launched before, which --resume reads, has the server and token of its jobs.
    launched = config.token_file is not None and config.token_file.parent == cluster.files
    if config.server != INLINE and not launched:
        raise UserError("server: `launch` starts the reference server", "leave it out")
    if config.token is not None or (config.token_file is not None and not launched):
        raise UserError("token: `launch` makes a token for each job", "leave token and token_file out")
    if config.weights != "directory":
        raise UserError("weights: `launch` chooses how they reach the workers", "leave it out")
    if config.vllm.enable_sleep_mode:
        raise UserError("vllm.enable_sleep_mode: each job has GPUs of its own", "leave it out")
    if config.sampler_traits.server:
        if config.vllm_url != _VLLM_URL:
            raise UserError("vllm_url: `launch` starts a vLLM server for each worker", "leave it out")
        return
    for name, value in vars(cluster.options).items():
        if name.startswith("vllm_") and value:
            raise UserError(
                f"{spell_option(name)}: sampler {config.sampler} has no vLLM server",
                f"leave it out, or use {spell_setting('sampler', 'vllm-server')}",
            )


def _tokens(directory: Path, run: str) -> Mapping[str, str]:
    """A token for each role: `tokens` for the server, ROLE.token for a client. Those of workers and trainer are valid
    for this run only. Tokens of an earlier launch of this run are used again."""
    bound, names = f" run={run}", ("tokens", *(f"{role}.token" for role in _ROLES))
    if all((directory / name).exists() for name in names):
        earlier = {name: (directory / name).read_text() for name in names}
        if f"{bound}\n" in earlier["tokens"]:
            return earlier
    tokens = {role: secrets.token_urlsafe(32) for role in _ROLES}
    lines = [f"{role} {token} name={role}{'' if role == 'admin' else bound}\n" for role, token in tokens.items()]
    return {"tokens": "".join(lines)} | {f"{role}.token": f"{token}\n" for role, token in tokens.items()}
