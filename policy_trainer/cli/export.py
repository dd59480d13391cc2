"""The command `policy-trainer export`."""

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import ExportConfig


def run(arguments: list[str]) -> int:
    config = read_settings(ExportConfig, arguments, "export")
    from policy_trainer.ranks.export import export  # late, so that wrong options fail before PyTorch loads

    export(config.checkpoint, config.output, config.model)
    print(config.output)
    return 0
