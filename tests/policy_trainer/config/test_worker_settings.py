"""What travels to workers with published weights, and what a worker refuses to take from there."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from policy_trainer.config import RolloutConfig, TrainConfig
from policy_trainer.config.marks import Travel
from policy_trainer.config.worker_settings import refused_settings, travelling_settings, worker_settings
from policy_trainer.rewards.registry import CONFIGURED, RULES, SUMS
from shared.settings import Section
from shared.settings.names import group_at

HOSTILE = (
    "subprocess:getoutput",
    "caller:f",
    "http://evil.example/judge",
    "/etc/passwd",
    "../../up",
    "evil/repository",
)
# Texts that are only text. A new setting does not belong here unless its value reaches nothing but prompts, completions
# and the names of parts of a dataset.
_OF_A_SOURCE = ("columns.prompt", "columns.answer", "countdown.operators", "subset", "split", "eval_split")
TEXTS = {
    "data.system_prompt", "data.assistant_prefill", "data.chat_template_kwargs", "data.teacher_prompt_template",
    "sampling.stop",
    *(f"{source}.{name}" for source in ("data", "data.mixture") for name in _OF_A_SOURCE),
}  # fmt: skip
REFUSED = {
    "model", "revision", "task", "rewards", "data.path", "data.eval_path", "data.dataset", "data.mixture.path",
    "data.chat_template",
    "data.mixture.eval_path", "data.mixture.dataset", "data.mixture.task", "judging.model.path",
    "judging.model.revision", "loss.advantage", "tools", "environment", "turns.call_format",
}  # fmt: skip
LOCAL = {"judging.workers", "judging.memory_gib", "turns.memory_gib", "judging.model.device"}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, also of those in a list of groups."""
    for name in model.model_fields:
        group = group_at(model, (name,))
        yield from leaves(group, f"{prefix}{name}.") if group else (f"{prefix}{name}",)


def tables(name: str, value: Any) -> dict[str, Any]:
    """Only this setting, in a run that trains adapters, which publishes its model too."""
    whole: dict[str, Any] = {"lora": {"rank": 1}}
    *path, last = name.split(".")
    inner = whole
    for part in path:
        inner[part] = [{}] if part == "mixture" else inner.get(part, {})
        inner = inner[part][0] if part == "mixture" else inner[part]
    inner[last] = value
    return whole


def refuses(name: str, value: Any) -> bool:
    return bool([*refused_settings(travelling_settings(tables(name, value)))])


def travels(name: str) -> bool:
    return travelling_settings(tables(name, 1)) != travelling_settings(tables("lora.rank", 1))


def test_each_text_that_travels_is_refused_unless_it_is_only_text() -> None:
    """Numbers and choices cannot name anything: validation refuses a text in their place."""
    travelling = [name for name in leaves(RolloutConfig) if travels(name)]
    refused = {name for name in travelling if any(refuses(name, value) for value in HOSTILE)}
    assert refused == REFUSED
    assert {name for name in travelling if _is_text(name)} == TEXTS


def _is_text(name: str) -> bool:
    *path, last = name.split(".")
    model = group_at(RolloutConfig, tuple(path))
    assert model is not None
    return Travel.TEXT in model.model_fields[last].metadata


def test_where_a_worker_runs_and_whom_it_talks_to_does_not_travel() -> None:
    names = set(leaves(RolloutConfig))
    places = {"server", "run_dir", "device", "threads", "vllm_url", "config", "weights", "worker", "workers"}
    secrets = {"token", "token_file", "tls_ca", "trust_settings"}
    for name in LOCAL | places | secrets | {"vllm.gpu_memory_utilization"}:
        assert name in names and not travels(name), name


def test_trainer_and_worker_agree_on_what_travels() -> None:
    ours = {name for name in leaves(RolloutConfig) if travels(name)}
    theirs = {
        name
        for name in leaves(TrainConfig)
        if travelling_settings(tables(name, 1), TrainConfig) != travelling_settings(tables("lora.rank", 1), TrainConfig)
    }
    assert ours == theirs


def test_a_new_setting_is_refused_until_it_is_marked() -> None:
    class Inside(Section):
        place: str = ""
        places: list[str] = Field(default=[])
        anything: dict[str, Any] = Field(default={})
        count: int = 0
        words: Annotated[str, Travel.TEXT] = ""

    class New(BaseModel):
        inside: Annotated[Inside, Travel.PUBLISHED] = Inside()
        local: str = ""

    published = {
        "local": "x",
        "inside": {"place": "x", "places": ["x"], "anything": {"x": 1}, "count": 3, "words": "x"},
    }
    travelling = travelling_settings(published, New)
    assert "local" not in travelling
    refused = [name for name, _ in refused_settings(travelling, New)]
    assert refused == ["inside.place", "inside.places", "inside.anything"]


@pytest.mark.parametrize("rewards", [[], [*RULES, *CONFIGURED, *SUMS]])
def test_built_in_tasks_and_rewards_are_taken_over(rewards: list[str]) -> None:
    config = TrainConfig.model_validate(
        {"model": "m", "task": "mixture", "rewards": rewards, "sampling": {"stop": ["</answer>"]},
         "data": {"system_prompt": "http://is:a text", "mixture": [{"task": "gsm8k"}, {"task": "countdown"}]}}
    )  # fmt: skip
    assert [*refused_settings(worker_settings(config))] == []


def test_every_refused_setting_is_named() -> None:
    config = TrainConfig.model_validate(
        {"model": "some/base", "revision": "v1", "lora": {"rank": 2}, "task": "mixture",
         "rewards": ["accuracy", "http://judge/"],
         "judging": {"model": {"path": "a/reward-model", "revision": "v2"}, "workers": 9, "memory_gib": 0},
         "data": {"mixture": [{"task": "arithmetic"}, {"task": "jsonl", "path": "p", "eval_path": "e"},
                              {"task": "dataset", "dataset": "d"}, {"task": "my:Task"}]}}
    )  # fmt: skip
    settings = worker_settings(config)
    assert not {"workers", "memory_gib"} & settings["judging"].keys()
    assert sorted(name for name, _ in refused_settings(settings)) == [
        "data.mixture.1.eval_path", "data.mixture.1.path", "data.mixture.2.dataset", "data.mixture.3.task",
        "judging.model.path", "judging.model.revision", "model", "revision", "rewards",
    ]  # fmt: skip
