"""Where prompts come from, and how they are put to the model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from policy_trainer.config.sections import Section
from policy_trainer.config.task_settings import LOOKED_AT, refuse_unused

TASK_NAMES = tuple(LOOKED_AT)


def _task_name(name: str) -> str:
    if name in TASK_NAMES or ":" in name:
        return name
    raise ValueError(f"must be one of {', '.join(TASK_NAMES)}, or module:name of your own")


TaskName = Annotated[str, AfterValidator(_task_name)]


class PromptConfig(Section):
    """What every command says alike, whatever it takes its prompts from."""

    prompt_style: Literal["chat", "plain"] = "chat"
    """chat: messages go through the model's chat template. plain: their texts are joined by blank lines, without it."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own. The task's when not given; empty for none."""
    assistant_prefill: str | None = None
    """The beginning of the answer, put after every prompt: not sampled, not trained on, and in no completion. The
    task's when not given."""


class ColumnsConfig(Section):
    """jsonl, dataset: names of the columns of a dataset, or of the fields of a file."""

    prompt: str = "prompt"
    """The text of a problem, or its list of messages; those may also be in a field `messages` of a JSONL file."""
    answer: str = "answer"
    """The gold answer."""


class CountdownConfig(Section):
    """Problems that task countdown generates when it has no file: reach a target, using each number once."""

    numbers: int = Field(default=3, ge=2, le=6)
    """Numbers of a problem."""
    largest: int = Field(default=9, ge=1, le=99)
    """Numbers lie in [1, largest]."""
    operators: str = Field(default="+-", pattern=r"^[+\-*/]+$")
    """What targets are made with; an answer may use any of + - * /."""


class SourceConfig(Section):
    """Where the problems of one task are."""

    path: Path | None = None
    """Local file of training problems in the task's own format: parquet by its suffix, else JSONL. Before `dataset`."""
    eval_path: Path | None = None
    """File of held-out problems. Without it every tenth problem of `path` is held out."""
    dataset: str | None = None
    """Hugging Face dataset by name, or a directory that holds one; gsm8k and math know their own."""
    subset: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Split of the dataset to train on."""
    eval_split: str | None = None
    """Split that is held out. Without one, every tenth problem of `split` is."""
    columns: ColumnsConfig = ColumnsConfig()
    countdown: CountdownConfig = CountdownConfig()
    answer_rule: Literal["exact", "number", "math"] = "exact"
    """jsonl, dataset: how an answer is compared: as text, as a number, or as mathematics by math-verify."""


class MixtureSource(SourceConfig):
    """One task of a mixture."""

    task: TaskName
    """Any but mixture."""
    weight: float = Field(default=1.0, gt=0)
    """Problems are drawn from the tasks in proportion to their weights."""

    @model_validator(mode="after")
    def _task_has_what_it_needs(self) -> "MixtureSource":
        if self.task == "mixture":
            raise ValueError("data.mixture: a mixture holds no other mixture")
        check_source(self.task, self)
        return self


class DataConfig(PromptConfig, SourceConfig):
    """Where prompts come from and how answers are judged."""

    mixture: list[MixtureSource] = Field(default=[])
    """mixture: its tasks, each as {task, weight, path, …}."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Prompts with more tokens are too long."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a prompt that is too long: it is dropped and counted, or the run stops."""


def check_source(task: TaskName, source: SourceConfig) -> None:
    """Raises ValueError for a task that does not say where its problems are, or where it would not look for them."""
    if task == "jsonl" and source.path is None:
        raise ValueError("data.path: task jsonl needs the file of its problems")
    if task == "dataset" and not source.dataset and source.path is None:
        raise ValueError("data.dataset: task dataset needs the name of a Hugging Face dataset, or data.path a file")
    refuse_unused(task, source)
