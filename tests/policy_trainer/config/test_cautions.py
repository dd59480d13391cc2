"""Warnings about settings that may not do what they seem to."""

from typing import Any

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.config.train import cautions


def cautions_of(**settings: Any) -> list[str]:
    return cautions(TrainConfig.model_validate({"model": "m"} | settings))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"loss": {"kl": "k1"}}, "expected gradient of 0"),
        ({"loss": {"kl_in": "both"}}, "twice"),
        (
            {"loss": {"surrogate": "vespo", "aggregation": "token_mean", "importance_sampling_level": "sequence"}},
            "vespo",
        ),
        ({"loss": {"aggregation": "luspo"}}, "importance_sampling_level = sequence"),
        *(
            ({"sampling": sampling, "sampler": sampler, "loss": {"old_logps": "current"}}, "which tokens they kept")
            for sampling in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})
            for sampler in ("vllm", "mine:Sampler")
        ),
        ({"sampling": {"repetition_penalty": 1.2}}, "penalised"),
        ({"groups_per_step": 2}, "the groups of 4 steps"),
        ({"loss": {"echo_coef": 0.05}}, "nothing is answered"),
        ({"reference": {"decay": 0.9}}, "sync_steps"),
        ({"lora": {"alpha": 16}}, "lora.rank is 0"),
        ({"judging": {"steps": True}}, "outcome"),
        ({"judging": {"model": {"path": "judge"}}}, "--rewards"),
        (
            {"task": "jsonl", "data": {"path": "p.jsonl", "answer_in": "text"}, "rewards": ["accuracy", "format"]},
            "rewards format look for <answer> tags",
        ),
        ({"task": "jsonl", "data": {"path": "p.jsonl", "answer_in": "last_number"}}, "--data.answer-rule number"),
    ],
)
def test_a_caution(settings: dict[str, Any], word: str) -> None:
    (caution,) = cautions_of(**settings)
    assert word in caution


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": {"kl": "k1", "kl_in": "reward"}},
        {"loss": {"kl": "k1", "kl_weight": "ratio"}},
        {"loss": {"kl": "k1", "beta": 0}},
        {"loss": {"kl": "k2"}},
        {"loss": {"echo_coef": 0.05}, "tools": ["module:tool"]},
        *({"sampling": sampling} for sampling in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})),
        {"loss": {"surrogate": "vespo", "aggregation": "token_mean"}},
        {"loss": {"aggregation": "luspo", "importance_sampling_level": "sequence"}},
        {"lora": {"alpha": 16, "rank": 4}},
        {"judging": {"steps": True}, "loss": {"advantage": "process"}},
        {"judging": {"model": {"path": "judge"}}, "rewards": ["model"]},
        {"task": "jsonl", "data": {"path": "p.jsonl", "answer_in": "last_number", "answer_rule": "number"}},
        {"task": "jsonl", "data": {"path": "p.jsonl", "answer_in": "boxed"}, "rewards": ["accuracy"]},
    ],
)
def test_no_caution(settings: dict[str, Any]) -> None:
    assert cautions_of(**settings) == []
