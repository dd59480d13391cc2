"""A run on Kubernetes: a JobSet whose jobs exchange data only through the reference server."""

import json
import posixpath
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import BaseModel

from policy_trainer.cli.launch.cluster import Cluster
from policy_trainer.config import TrainConfig
from policy_trainer.config.functions import is_function
from policy_trainer.config.marks import Resume, Travel, find_mark
from policy_trainer.run_files.run_directory import config_text
from shared.errors import UserError
from shared.spelling import spell_setting

_JOBSET = "jobset.yaml"
_FILES = (_JOBSET, "data.yaml", "tokens.yaml", "files.yaml")
# Names of pods have at most 63 characters: RUN-trainer-0-12-abcde.
_RUN = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
# Where a pod has its own token.
_TOKEN_FILE = Path("/tokens/token")
_SERVE = ("serve", "--host", "0.0.0.0", "--token-file", "/tokens/tokens", "--data-dir", "/data")
_VLLM_IMAGE = "vllm/vllm-openai:v0.33.0"
# Settings with paths that are only written.
_WRITTEN = {"run_dir", "record"}
# Settings that may be a directory or a Hub id.
_MODELS = {"model", "teacher", "path"}


class _Claim(NamedTuple):
    """A PersistentVolumeClaim, and the directory at which pods see it."""

    name: str
    path: PurePosixPath


class Kubernetes(Cluster):
    name = "kubernetes"
    title = "Kubernetes, which needs JobSet"
    program = "kubectl"
    remedy = "install it"

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("with --kubernetes", "pods read and write volumes, not this machine's files")
        group.add_argument("--image", help="image with Tandem, as docker/Dockerfile builds it; required")
        group.add_argument(
            "--claim", metavar="NAME=DIR", action="append", default=[], type=_claim, dest="claims",
            help="PersistentVolumeClaim with your model, data or code, which all pods read at DIR; may be repeated. "
            "The first DIR is the pods' working directory, from which they import modules",
        )  # fmt: skip
        group.add_argument(
            "--storage", metavar="SIZE", type=_quantity, default="500Gi",
            help="size of the trainer's volume, for checkpoints and the trained model; default: 500Gi",
        )  # fmt: skip
        group.add_argument(
            "--storage-class", metavar="NAME",
            help="storage class of the trainer's volume; with --nodes above 1 it must allow ReadWriteMany; "
            "default: the cluster's",
        )  # fmt: skip

        group.add_argument(
            "--vllm-image", metavar="IMAGE",
            help=f"with --sampler vllm-server: image of a worker's vLLM; default: {_VLLM_IMAGE}",
        )  # fmt: skip

    def refuse(self) -> None:
        if not self.options.image:
            raise UserError("launch: pods need an image with Tandem", "--image NAME")
        if not re.fullmatch(_RUN, self.given.run):
            raise UserError(
                f"run: pods are named after it, got {self.given.run!r}",
                f"set {spell_setting('run')}: at most 40 lower-case letters, digits and '-', starting with a letter "
                "and not ending with '-'",
            )
        if self.given.resume:
            raise UserError("resume: the trainer's job always continues the run on its volume", "leave it out")
        if self.given.reference.snapshot_root is not None:
            raise UserError(
                "reference.snapshot_root: the server and the trainer share no directory that they can write to",
                "leave it out",
            )
        for name, value in _local_things(self.given):
            if not self._sees(value):
                raise UserError(
                    f"{name}: pods do not see {value} on this machine",
                    "put it on a volume: --claim NAME=DIR, and give its path there",
                )

    @property
    def _server(self) -> str:
        """The name of the server's pod within the cluster's network."""
        return f"{self.given.run}-server-0-0.{self.given.run}"

    def _sees(self, value: str) -> bool:
        """Whether a claim may have it: a path in its directory, or a module."""
        claims = self.options.claims
        if not claims or is_function(value):
            return bool(claims)
        path = PurePosixPath(posixpath.normpath(claims[0].path / value))
        return any(path.is_relative_to(claim.path) for claim in claims)

    def of_the_jobs(self) -> TrainConfig:
        return self.given.model_copy(
            update={
                "run_dir": Path("/runs", self.given.run),
                "server": f"http://{self._server}:8400",
                "weights": "server",
                "rollout": "external",
                "token_file": _TOKEN_FILE,
            }
        )

    def render(self, config: TrainConfig, tokens: Mapping[str, str]) -> Mapping[str, str]:
        from shared.models import load_outline  # late, since it loads PyTorch

        options = self.options
        on_claim = Path(config.model).is_absolute() and not Path(config.model).exists()
        if on_claim:
            print(f"model: {config.model} is not on this machine; the server's limits suit a model without images")
        outline = None if on_claim else load_outline(config.model, revision=config.revision)
        serve = self.serve(config, outline)
        values = {
            "run": config.run,
            "files": self.files,
            "image": options.image,
            "config": config_text(config),
            "tokens": tokens,
            "trainer_token": self.trainer_token,
            "serve": shlex.join([*_SERVE, "--allowed-hosts", self._server, *serve]),
            "nodes": options.nodes,
            "ranks": options.nodes * max(1, options.gpus_per_node),
            "workers": options.workers,
            "vllm": self.vllm(config, outline),
            "vllm_image": options.vllm_image or _VLLM_IMAGE,
            "gpus": self.gpus(config, serve),
            "claims": options.claims,
            "storage": options.storage,
            "storage_class": options.storage_class,
        }
        return self.fill_in(_FILES, values)

    @property
    def commands(self) -> Sequence[Sequence[str | Path]]:
        # A JobSet of this name that exists is refused before its data change. Without its data none begins.
        begin = json.dumps({"spec": {"suspend": False}})
        return [
            ["kubectl", "create", "--filename", self.files / _JOBSET],
            ["kubectl", "apply", "--filename", self.files / "data.yaml", "--filename", self.files / "tokens.yaml"],
            ["kubectl", "patch", "jobset", self.given.run, "--type", "merge", "--patch", begin],
        ]

    def submit(self) -> int:
        status = super().submit()
        if status == 0:
            print(f"{self.files / _JOBSET} says how to follow, stop and continue the run")
        return status


def _local_things(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of settings that name a file, a directory or a module to read. A model that is no directory
    here is one of the Hub, or on a volume."""
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name in _WRITTEN or find_mark(info, Resume) is Resume.NOT_KEPT or find_mark(info, Travel) is Travel.TEXT:
            continue
        for item in value if isinstance(value, list) else [value]:
            text = str(item).rpartition("=")[2]  # an environment may be NAME=module:class
            if isinstance(item, BaseModel):
                yield from _local_things(item, f"{prefix}{name}.")
            elif isinstance(item, Path) or is_function(text) or (name in _MODELS and Path(text).is_dir()):
                yield f"{prefix}{name}", text


def _claim(text: str) -> _Claim:
    name, _, path = text.partition("=")
    if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name) or not re.fullmatch(r"/[^:\s]+", path):
        raise ArgumentTypeError(f"must be NAME=DIR, as in inputs=/inputs; got {text!r}")
    return _Claim(name, PurePosixPath(path))


def _quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(Mi|Gi|Ti|M|G|T)", text):
        raise ArgumentTypeError(f"must be a size such as 500Gi; got {text!r}")
    return text
