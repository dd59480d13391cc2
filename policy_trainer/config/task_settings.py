"""Which settings of SourceConfig each task uses. A setting that the task would ignore is refused."""

from collections.abc import Mapping, Set

from pydantic import BaseModel

_FILES = frozenset({"path", "eval_path"})
_DATASETS = frozenset({"dataset", "subset", "split", "eval_split"})
_ANSWERS = frozenset({"columns", "answer_rule"})

USED_SETTINGS: Mapping[str, Set[str]] = {
    "arithmetic": frozenset(),
    "countdown": _FILES | _DATASETS | {"countdown"},
    "dataset": _FILES | _DATASETS | _ANSWERS,
    "gsm8k": _FILES | _DATASETS,
    "jsonl": _FILES | _ANSWERS,
    "math": _FILES | _DATASETS,
    "mixture": frozenset({"mixture"}),
}
# All settings that say where problems are.
SOURCE_SETTINGS: Set[str] = frozenset().union(*USED_SETTINGS.values())


def refuse_unused(task: str, source: BaseModel) -> None:
    """Raises ValueError for a setting that differs from its default and that the task would ignore.

    source: a SourceConfig. A user's own task is not in the table; it may use every setting except mixture.
    """
    given = [name for name in type(source).model_fields if name in SOURCE_SETTINGS and _is_given(source, name)]
    for name in given:
        if name not in USED_SETTINGS.get(task, SOURCE_SETTINGS - {"mixture"}):
            others = ", ".join(other for other, names in USED_SETTINGS.items() if name in names)
            inside = "; a task of data.mixture has its own" if task == "mixture" else ""
            raise ValueError(f"data.{name}: task {task} does not use it{inside}: leave it out, or use --task {others}")
    if "path" in given and "eval_split" in given and "eval_path" not in given:
        raise ValueError(
            "data.eval_split: it is a split of data.dataset, but data.path takes precedence over that: "
            "give data.eval_path, or leave eval_split out"
        )
    generated = task == "countdown" and not {"path", "dataset"} & set(given)
    for name in (name for name in given if generated and name != "countdown"):
        raise ValueError(
            f"data.{name}: task countdown generates all its problems, held-out ones too, unless data.path or "
            f"data.dataset is given: give one of them, or leave {name} out"
        )


def _is_given(source: BaseModel, name: str) -> bool:
    return getattr(source, name) != type(source).model_fields[name].default
