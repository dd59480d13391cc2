"""How prompts are put to the model."""

from typing import Literal

from policy_trainer.config.section import Section


class PromptConfig(Section):
    """What every command says alike, whatever it takes its prompts from."""

    prompt_style: Literal["chat", "plain"] = "chat"
    """chat: messages go through the model's chat template. plain: their texts are joined by blank lines, without it."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own. The task's when not given; empty for none."""
    assistant_prefill: str | None = None
    """The beginning of the answer, put after every prompt: not sampled, not trained on, and in no completion. The
    task's when not given."""
