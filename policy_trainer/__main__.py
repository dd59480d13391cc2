"""The command `policy-trainer`."""

import sys

from shared.commands import choose_command, end_with_reader

DESCRIPTION = """GRPO training of language models on the scored batches of a reference server.

`policy-trainer COMMAND --help` explains the options that matter most, `--help-all` all. They also come from the
environment (POLICY_TRAINER_MAX_STEPS=100, POLICY_TRAINER_LOSS__BETA=0.04) and from a TOML file
(--config FILE).
"""
COMMANDS = {
    "sft": "teach a model the completions of a JSONL file, before GRPO",
    "reward-model": "train a reward model on pairs of a better and a worse answer, for --rewards model",
    "train": "train a policy; starts a rollout worker, too, unless --rollout external is given",
    "launch": "train on a cluster with Slurm or Kubernetes: writes the jobs' files, and submits them",
    "doctor": "checks all that `train` needs, up to one full step, or only its memory; says what to correct",
    "replay": "train on recorded batches without sampling, to debug a loss or compare two",
    "rollout": "sample completions with a run's published weights and upload them",
    "samples": "what a run's model wrote: prompts with their completions, rewards and advantages",
    "dashboard": "open ended runs in the dashboard: curves, warnings, settings, steps, groups",
    "report": "one HTML file about a run: curves, time, settings, samples",
    "compare": "one HTML file that lays several runs over each other",
    "eval": "accuracy of a model on evaluation problems, with a confidence interval",
    "export": "a Hugging Face model of a checkpoint that was written under torchrun",
    "push": "a run's model with a card, to the Hugging Face Hub or into a directory",
    "presets": "settings of published recipes, for --preset: the list, and every number of one",
    "demo": "a tiny model learns arithmetic on this machine in about a minute",
    "demo-setup": "write the demo's base model and configuration, to start its processes yourself",
}
# The module of each command whose name is not that of its module.
MODULES = {
    **dict.fromkeys(("train", "rollout", "replay", "sft", "reward-model", "export", "demo", "demo-setup"), "training"),
    **dict.fromkeys(("report", "compare"), "report"),
    "launch": "launch.command",
}
# Those that torchrun may start.
RANKED = ("train", "doctor")


@end_with_reader()
def main() -> None:
    arguments = sys.argv[1:]
    name, run = choose_command("policy-trainer", DESCRIPTION, COMMANDS, "policy_trainer.cli", arguments, MODULES)
    from policy_trainer.cli.status import exit_status  # not for --help, which answers at once
    from policy_trainer.processes.variables import in_torchrun

    if in_torchrun() and name not in RANKED:
        sys.exit(f"policy-trainer {name}: torchrun is only for train and doctor: start {name} without it")
    sys.exit(exit_status(name, run))


if __name__ == "__main__":
    main()
