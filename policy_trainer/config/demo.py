"""Settings of the demo."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

from policy_trainer.config.commands import ENV_PREFIX
from shared.settings import settings_config


class DemoChoices(BaseSettings):
    """What can be chosen of the demo, whoever starts its processes."""

    model_config = settings_config(ENV_PREFIX)

    config: Path | None = None
    """TOML file with any of these settings."""
    seed: int = Field(default=0, ge=0)
    """Decides the base model, the problems and the sampling."""
    run_dir: Path = Path("runs/demo")
    """Everything the demo leaves."""
    max_steps: int = Field(default=160, ge=1)
    """Training steps."""


class DemoConfig(DemoChoices):
    """Train a tiny model to do arithmetic: everything on this machine, in a few minutes."""

    resume: bool = False
    """Continue an interrupted demo from its newest checkpoint."""


class DemoSetupConfig(DemoChoices):
    """Write the demo's base model and its config.toml into run_dir, for processes that somebody else starts."""

    server: str = "http://127.0.0.1:8400"
    """URL of the reference server that will serve the base model."""
