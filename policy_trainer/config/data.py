"""Where problems come from, and how they become prompts."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from policy_trainer.config.marks import Travel
from shared.settings import InHelp, Section
from shared.spelling import spell_setting

_FILES = frozenset({"path", "eval_path"})
_DATASETS = frozenset({"dataset", "subset", "split", "eval_split"})
_ANSWERS = frozenset({"columns", "answer_rule", "answer_in"})
_ORDER = frozenset({"shuffle"})

USED_SETTINGS: Mapping[str, Set[str]] = {
    "arithmetic": frozenset(),
    "countdown": _FILES | _DATASETS | _ORDER | {"countdown"},
    "dataset": _FILES | _DATASETS | _ANSWERS | _ORDER,
    "environment": frozenset(),
    "geometry3k": _FILES | _DATASETS | _ORDER,
    "gsm8k": _FILES | _DATASETS | _ORDER,
    "jsonl": _FILES | _ANSWERS | _ORDER,
    "math": _FILES | _DATASETS | _ORDER,
    "mixture": frozenset({"mixture"}),
}
# All settings that say where problems are.
SOURCE_SETTINGS: Set[str] = frozenset().union(*USED_SETTINGS.values())


TASK_NAMES = tuple(USED_SETTINGS)
# Arguments of apply_chat_template that the encoder of prompts gives itself.
OWN_TEMPLATE_KWARGS = {
    "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "return_dict", "return_tensors", "tools",
}  # fmt: skip


def _task_name(name: str) -> str:
    if name in TASK_NAMES or ":" in name:
        return name
    raise ValueError(f"must be one of {', '.join(TASK_NAMES)}, or module:name for your own task")


TaskName = Annotated[str, AfterValidator(_task_name), Travel.NAME]


class PromptConfig(Section):
    """How messages become a prompt: the same settings in every command."""

    prompt_style: Literal["chat", "plain"] = "chat"
    """chat: messages go through the model's chat template, and texts as a user's messages where there is one. plain:
    texts are taken as they stand, and those of messages are joined by blank lines."""
    chat_template: Path | None = None
    """File with a Jinja template to use instead of the model's chat template. It is saved with the trained model."""
    system_prompt: Annotated[str | None, Travel.TEXT] = None
    """System prompt for every problem without a system message of its own. Default: the task's; empty: none."""
    assistant_prefill: Annotated[str | None, Travel.TEXT] = None
    """Beginning of the answer. It is the end of the prompt: not sampled, not trained on. Rewards judge it with the
    completion. Default: the task's; empty: none."""
    judge_opening: Annotated[bool, Travel.PUBLISHED] = True
    """Rewards judge the completion together with the tag with which the chat template opens the answer, such as
    `<think>`. False: without the tag, as in TRL."""
    chat_template_kwargs: Annotated[dict[str, Any], Travel.TEXT] = Field(default={})
    """Variables of the model's chat template, as JSON on the command line: '{"enable_thinking": false}' for Qwen3. A
    row's column of this name takes precedence."""

    @model_validator(mode="after")
    def _check_chat_template(self) -> "PromptConfig":
        if self.chat_template is not None and self.prompt_style == "plain":
            plain = spell_setting("data.prompt_style", "plain")
            raise ValueError(f"data.chat_template: {plain} uses no chat template: leave out one of the two")
        return self

    @model_validator(mode="after")
    def _check_chat_template_kwargs(self) -> "PromptConfig":
        """Rejects variables that would be ignored, that the encoder sets itself, or whose text means a JSON value."""
        where = "data.chat_template_kwargs:"
        if self.chat_template_kwargs and self.prompt_style == "plain":
            raise ValueError(
                f"{where} {spell_setting('data.prompt_style', 'plain')} uses no chat template: leave one out"
            )
        if taken := OWN_TEMPLATE_KWARGS & self.chat_template_kwargs.keys():
            raise ValueError(f"{where} {min(taken)} is set for each prompt: leave it out")
        for name, value in self.chat_template_kwargs.items():
            if value in ("true", "false", "null"):  # from NAME=VALUE; a template takes any text as true
                raise ValueError(
                    f"{where} {name} is the text {value!r}: write JSON, {spell_setting('data.chat_template_kwargs')} "
                    f"'{{\"{name}\": {value}}}'"
                )
        return self


class ColumnsConfig(Section):
    """Tasks jsonl and dataset: names of the columns of a dataset, or of the fields of a file."""

    prompt: Annotated[str, Travel.TEXT] = "prompt"
    """Column with the text of a problem or its list of messages. With the default, rows without it may have `messages`
    or `problem`."""
    answer: Annotated[str, Travel.TEXT] = "answer"
    """Column with the gold answer. Rows may lack it where no reward compares with it."""


class CountdownConfig(Section):
    """Problems that task countdown generates when it has no file or dataset: reach a target, using each number once."""

    numbers: int = Field(default=3, ge=2, le=6)
    """How many numbers each problem has."""
    largest: int = Field(default=9, ge=1, le=99)
    """Largest number: numbers lie in [1, largest]."""
    operators: Annotated[str, Travel.TEXT] = Field(default="+-", pattern=r"^[+\-*/]+$")
    """Operators from which targets are computed. An answer may use any of + - * /."""


class SourceConfig(Section):
    """Where the problems of one task are."""

    path: Annotated[Path | None, InHelp("train doctor eval")] = None
    """Local file of training problems in the task's format: parquet if it ends in .parquet, else JSONL. It takes
    precedence over `dataset`."""
    eval_path: Annotated[Path | None, InHelp("eval")] = None
    """File of held-out problems. Default: every tenth problem of `path` is held out."""
    dataset: str | None = None
    """Name of a Hugging Face dataset, or a directory that holds one. Tasks gsm8k and math have a default."""
    subset: Annotated[str | None, Travel.TEXT] = None
    """Configuration of the dataset, if it has several."""
    split: Annotated[str, Travel.TEXT] = "train"
    """Split of the dataset to train on."""
    eval_split: Annotated[str | None, Travel.TEXT] = None
    """Split of the dataset to hold out. Default: every tenth problem of `split` is held out."""
    shuffle: Annotated[bool, Travel.PUBLISHED] = True
    """Shuffle the training problems anew in each pass, by seed. False: each pass keeps the order of the file or
    dataset, such as from easy to hard."""
    columns: ColumnsConfig = ColumnsConfig()
    countdown: CountdownConfig = CountdownConfig()
    answer_rule: Literal["exact", "number", "math"] = "exact"
    """Tasks jsonl and dataset: answers are compared as text, as numbers, or as mathematics by math-verify."""
    answer_in: Literal["tags", "boxed", "last_number", "text"] = "tags"
    """Tasks jsonl and dataset: where a completion has its answer: in its last answer tags or its last \\boxed{}, as its
    last number, or as the whole text."""


class MixtureSource(SourceConfig):
    """One task of a mixture."""

    task: TaskName
    """Name of the task: any except mixture."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this task: problems are drawn from the tasks in proportion to their weights."""

    @model_validator(mode="after")
    def _check_task(self) -> "MixtureSource":
        if self.task == "mixture":
            raise ValueError("data.mixture: a mixture cannot contain another mixture")
        check_source(self.task, self)
        return self


class DataConfig(PromptConfig, SourceConfig):
    """Where problems come from, and how they become prompts."""

    mixture: list[MixtureSource] = Field(default=[])
    """Task mixture: its tasks, each as {task, weight, path, …}."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Maximum tokens of a prompt."""
    teacher_prompt_template: Annotated[str | None, Travel.TEXT] = None
    """What a teacher reads in place of the prompt: a text with {prompt} and {privileged_context}, the row's column of
    that name, such as a demonstration. Without `teacher`, the initial policy is the teacher (SDFT). Default: the
    teacher reads the prompt."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a prompt over max_prompt_length. drop: it is skipped and counted. refuse: the run stops."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Smaller pictures are enlarged to this many pixels. Default: the model's. For models that take pictures of any
    size, such as Qwen's."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Larger pictures are reduced to this many pixels, which bounds the tokens of a picture: 28 x 28 pixels a token for
    Qwen2.5-VL, 32 x 32 for Qwen3-VL. Default: the model's."""

    @model_validator(mode="after")
    def _check_teacher_prompt(self) -> "DataConfig":
        template = self.teacher_prompt_template
        missing = [
            name for name in ("{prompt}", "{privileged_context}") if template is not None and name not in template
        ]
        if missing:
            raise ValueError(f"data.teacher_prompt_template: it must contain {missing[0]}; got {template!r}")
        return self

    @model_validator(mode="after")
    def _check_pixels(self) -> "DataConfig":
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"data.min_pixels: must not be larger than data.max_pixels, {self.max_pixels}, got {self.min_pixels}"
            )
        return self


def check_source(task: TaskName, source: SourceConfig) -> None:
    """Raises ValueError for a task without a source, and for a non-default setting that the task ignores.

    A user's task may use every setting except mixture.
    """
    if task == "jsonl" and source.path is None:
        raise ValueError(f"data.path: task jsonl needs a file of problems: give {spell_setting('data.path')} FILE")
    if task == "dataset" and not source.dataset and source.path is None:
        raise ValueError(
            f"data.dataset: task dataset needs a dataset: give {spell_setting('data.dataset')} NAME, or "
            f"{spell_setting('data.path')} FILE"
        )
    fields: Mapping[str, Any] = type(source).model_fields
    given = [name for name in fields if name in SOURCE_SETTINGS and getattr(source, name) != fields[name].default]
    for name in given:
        if name not in USED_SETTINGS.get(task, SOURCE_SETTINGS - {"mixture"}):
            users = ", ".join(other for other, names in USED_SETTINGS.items() if name in names)
            inside = "; a task of data.mixture has its own" if task == "mixture" else ""
            raise ValueError(
                f"data.{name}: task {task} does not use it{inside}: leave it out, or use {spell_setting('task')} "
                f"{users}"
            )
    if "path" in given and "eval_split" in given and "eval_path" not in given:
        raise ValueError(
            "data.eval_split: it is a split of data.dataset, but data.path takes precedence over that: "
            "give data.eval_path, or leave eval_split out"
        )
    others = [name for name in given if name != "countdown"]
    if task == "countdown" and others and not {"path", "dataset"} & {*others}:
        raise ValueError(
            f"data.{others[0]}: task countdown generates all its problems, held-out ones too, unless data.path or "
            f"data.dataset is given: give one of them, or leave {others[0]} out"
        )
