"""What Slurm and Kubernetes have in common: a run's settings become files for the cluster's own command."""

import shlex
import subprocess
from abc import ABC, abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from policy_trainer.config import TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Cluster(ABC):
    """A run that is being launched.

    given: its settings. directory: of the run, on this machine. files: where the files for the cluster are written.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]
    """The command that submits."""
    remedy: ClassVar[str]
    """What helps where `program` is missing."""

    def __init__(self, options: Namespace, given: TrainConfig) -> None:
        self.options = options
        self.given = given
        self.directory = RunDirectory(given.run_dir.resolve())
        self.files = self.directory.root / self.name

    @classmethod
    @abstractmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        """Those that only this cluster has."""

    @abstractmethod
    def refuse(self) -> None:
        """Raises UserError for settings that do not suit this cluster."""

    @property
    def trainer_token(self) -> str:
        """Name of the trainer's token file. Only an admin may renew the reference."""
        return "admin.token" if self.given.reference.sync_steps else "train.token"

    @abstractmethod
    def of_the_jobs(self) -> TrainConfig:
        """The settings of the trainer and the workers."""

    @abstractmethod
    def render(self, config: TrainConfig, tokens: Mapping[str, str]) -> Mapping[str, str]:
        """The text of each file to write. tokens: names of token files, and their text.

        Raises UserError if the model cannot be read."""

    def write(self, texts: Mapping[str, str]) -> None:
        """Writes the files. Those with tokens are for this user only."""
        self.files.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(self.files / name, text, mode=0o600 if "token" in name else 0o666)

    @property
    @abstractmethod
    def commands(self) -> Sequence[Sequence[str | Path]]:
        """Those that submit the written files."""

    def submit(self) -> int:
        """Runs the commands up to the first that fails. Returns the exit status."""
        for command in self.commands:
            if status := subprocess.run(command, check=False).returncode:
                return status
        return 0

    def serve(self, config: TrainConfig, outline: "PreTrainedModel | None") -> list[str]:
        """Options of `ref-server serve` for the run. outline: the policy's shapes."""
        from policy_trainer.trainer.reference_servers import serve_options  # late, since it loads PyTorch

        options = serve_options(config, outline)
        return options if config.reference.device == "auto" else [*options, "--device", config.reference.device]

    def vllm(self, config: TrainConfig, outline: "PreTrainedModel | None") -> "VllmServe | None":
        """The vLLM server of each worker; None if workers sample without one. Arguments: see `serve`."""
        from policy_trainer.rollout.sampling.vllm_options import serve_arguments, server_environment  # late, like above

        if not config.sampler_traits.server:
            return None
        arguments = serve_arguments(config, outline, config.lora.rank)
        return VllmServe([*arguments, *self.options.vllm_option], server_environment(config.lora.rank))

    def gpus(self, config: TrainConfig, serve: Sequence[str]) -> Mapping[str, int]:
        """GPUs of the server with these options, of each node of the trainer, and of each worker."""
        if not self.options.gpus_per_node:
            return dict.fromkeys(("server", "trainer", "workers"), 0)
        traits = config.sampler_traits
        per_worker = config.vllm.tensor_parallel_size if traits.takes_first_gpus or traits.server else 1
        return {"server": int("--no-model" not in serve), "trainer": self.options.gpus_per_node, "workers": per_worker}

    def fill_in(self, names: Sequence[str], values: Mapping[str, Any]) -> dict[str, str]:
        """The templates with these names, filled in."""
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates" / self.name),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["quote"] = lambda text: shlex.quote(str(text))
        return {name: environment.get_template(name).render(values) for name in names}


class VllmServe(NamedTuple):
    """Arguments of `vllm serve`, except its address, and its environment variables."""

    arguments: Sequence[str]
    environment: Mapping[str, str]

    @property
    def variables(self) -> Sequence[str]:
        return [f"{name}={value}" for name, value in self.environment.items()]


def option(example: str) -> Callable[[str], str]:
    """The type of an option whose value is an option of another program, such as this example."""

    def read(text: str) -> str:
        if not text.startswith("-") or len(text.splitlines()) != 1:
            raise ArgumentTypeError(f"must be an option, as in {example}, got {text!r}")
        return text

    return read


def count(least: int) -> Callable[[str], int]:
    """The type of an option: an integer, at least this."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"must be an integer, at least {least}; got {text!r}")
        return int(text)

    return read
