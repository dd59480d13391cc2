"""The command `policy-trainer`."""

import json
import signal
import sys
from collections.abc import Callable, Mapping

from rich.console import Console

from policy_trainer.config import (
    ENV_PREFIX,
    DemoConfig,
    DemoSetupConfig,
    EvalConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.presets import SETTINGS
from shared.client import ClientError
from shared.client.credentials import remedy
from shared.errors import UserError
from shared.lifetime import end_with_parent
from shared.logs import configure_logs
from shared.settings import Settings, load_settings

USAGE = """usage: policy-trainer COMMAND [options]

GRPO training of language models on the scored batches of a reference server.

commands:
  sft        teach a model what the completions of a JSONL file say, before GRPO
  train      train a policy; starts a rollout worker of its own unless told --rollout external
  rollout    sample completions with a run's published weights and upload them
  eval       accuracy of a model on held-out problems, with a confidence interval
  presets    settings of published recipes, for --preset: what there are, and every number of one
  demo       a tiny model learns arithmetic on this machine in a few minutes
  demo-setup write the demo's base model and configuration, to start its processes yourself

`policy-trainer COMMAND --help` explains every option. Options also come from the environment
(POLICY_TRAINER_MAX_STEPS=100, POLICY_TRAINER_LOSS__BETA=0.04) and from a TOML file (--config FILE).
"""


class FileSchema(TrainConfig, RolloutConfig, SftConfig):  # type: ignore[misc]
    """What one TOML file may hold: the settings of every command. Where groups share a name, the first has most."""


def read_settings(cls: type[Settings], arguments: list[str], command: str) -> Settings:
    """Exits with status 2 and a reason where they are no settings of the command."""
    prog = f"policy-trainer {command}"
    return load_settings(cls, arguments, prog=prog, schema=FileSchema, presets=SETTINGS)


# Heavy imports wait until a command is chosen, so that --help and mistakes answer at once.
def _train(arguments: list[str]) -> int:
    config = read_settings(TrainConfig, arguments, "train")
    from policy_trainer.trainer.run import train

    console = Console(stderr=True)
    result = train(config, console)
    if result.finished:
        # There is nothing left to stop: a run is no failure because somebody stops its containers when a worker ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        console.print(f"{result.steps} steps in {result.seconds:.1f} s; the model is in {config.run_dir / 'model'}")
        return 0
    console.print(f"stopped after {result.steps} steps; add --resume to continue")
    return 128 + signal.SIGINT


def _sft(arguments: list[str]) -> int:
    config = read_settings(SftConfig, arguments, "sft")
    from policy_trainer.sft.sft import sft

    console = Console(stderr=True)
    result = sft(config, console)
    if result.finished:
        console.print(f"{result.steps} steps in {result.seconds:.1f} s; the model is in {config.run_dir / 'model'}")
        return 0
    console.print(f"stopped after {result.steps} steps; add --resume to continue")
    return 128 + signal.SIGINT


def _rollout(arguments: list[str]) -> int:
    config = read_settings(RolloutConfig, arguments, "rollout")
    from policy_trainer.rollout.worker import run_worker

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_worker(config)
    return 0


def _eval(arguments: list[str]) -> int:
    config = read_settings(EvalConfig, arguments, "eval")
    from policy_trainer.evaluation.standalone import evaluate_with_progress, evaluation_table

    console = Console(stderr=True)
    evaluations = evaluate_with_progress(config, console, "evaluating")
    console.print(evaluation_table(evaluations, f"{config.model} on {evaluations[0].problems} held-out problems"))
    print(json.dumps({"model": config.model, "evaluations": [item.summary() for item in evaluations]}, indent=2))
    return 0


def _demo(arguments: list[str]) -> int:
    config = read_settings(DemoConfig, arguments, "demo")
    from policy_trainer.demo.demo import demo

    return demo(config, Console())


def _demo_setup(arguments: list[str]) -> int:
    config = read_settings(DemoSetupConfig, arguments, "demo-setup")
    from policy_trainer.demo.demo import set_up

    print(set_up(config))
    return 0


def _presets(arguments: list[str]) -> int:
    from policy_trainer.cli.presets_cli import presets

    return presets(arguments)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "sft": _sft,
    "train": _train,
    "rollout": _rollout,
    "eval": _eval,
    "presets": _presets,
    "demo": _demo,
    "demo-setup": _demo_setup,
}


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if name not in COMMANDS:
        print(f"policy-trainer: there is no command {name!r}\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    configure_logs()
    end_with_parent()
    try:
        status = COMMANDS[name](arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 128 + signal.SIGINT
    except UserError as error:
        print(f"policy-trainer {name}: {error}", file=sys.stderr)
        status = 2
    except ClientError as error:
        print(f"policy-trainer {name}: {error}{remedy(error, ENV_PREFIX)}", file=sys.stderr)
        status = 1
    except RunFailed as error:
        print(f"policy-trainer {name}: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
