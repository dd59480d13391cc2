"""Refused: a reference with another vocabulary or tokenizer, a server too small for a group or a step."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import SamplingConfig, TrainConfig
from policy_trainer.queue_client.matching import check_group_fits, check_models_match, check_reference, check_room
from shared.api import LimitsView, ModelInfo, QueueView, ScoringView
from shared.errors import UserError
from shared.models import tokenizer_fingerprint
from shared.settings import from_values


def described(**known: Any) -> ModelInfo:
    """A reference model of which only these fields are known."""
    return ModelInfo.model_validate(dict.fromkeys(ModelInfo.model_fields) | {"max_batch_tokens": 1000} | known)


def test_the_same_vocabulary_and_tokenizer(make_tiny: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny(vocabulary=len(tokenizer))
    reference = described(
        name="ref", vocabulary_size=len(tokenizer), tokenizer_fingerprint=tokenizer_fingerprint(tokenizer)
    )
    check_models_match(reference, model, tokenizer, "mine")
    check_models_match(reference.model_copy(update={"vocabulary_size": 300}), model, tokenizer, "mine")
    with pytest.raises(UserError, match=r"^model: mine has a vocabulary of 265 tokens.* ref has 264"):
        check_models_match(reference.model_copy(update={"vocabulary_size": 264}), model, tokenizer, "mine")
    with pytest.raises(UserError, match=r"^model: the tokenizer of mine is not that of .* ref"):
        check_models_match(reference.model_copy(update={"tokenizer_fingerprint": "other"}), model, tokenizer, "mine")


@pytest.mark.parametrize("loss", [{}, {"kl_in": "reward"}])
def test_a_penalty_wants_a_reference(loss: dict[str, str]) -> None:
    config = from_values(TrainConfig, model="mine", loss=loss)
    with pytest.raises(UserError, match=r"^server: it has no reference model .*serve --model mine,.*--loss.beta 0$"):
        check_reference(described(), config)
    check_reference(described(name="ref"), config)


@pytest.mark.parametrize(
    "settings", [{"loss": {"beta": 0}}, {"lora": {"rank": 2}, "reference": {"source": "adapter-off"}}]
)
def test_a_server_without_a_model_suffices(settings: dict[str, Any]) -> None:
    check_reference(described(), from_values(TrainConfig, model="mine", **settings))


@pytest.mark.parametrize(
    ("beta", "server", "words"),
    [
        (0.0, {}, "it has no model .*serve --model TEACHER$"),
        (0.1, {"name": "ref"}, "ref, is the reference.* --model mine --teacher TEACHER, .*--loss.beta 0$"),
        (0.0, {"name": "ref"}, None),
        (0.1, {"name": "ref", "teacher": "wise"}, None),
    ],
)
def test_a_distillation_wants_a_teacher(beta: float, server: dict[str, str], words: str | None) -> None:
    loss = {"advantage": "distill", "beta": beta}
    config = from_values(TrainConfig, model="mine", server="http://far:8400", loss=loss)
    if words is None:
        check_reference(described(**server), config)
    else:
        with pytest.raises(UserError, match=f"^server: .*{words}"):
            check_reference(described(**server), config)


def test_a_server_without_a_model_has_nothing_to_compare_with(make_tiny: Any, tokenizer: Any) -> None:
    check_models_match(described(), make_tiny(), tokenizer, "mine")


@pytest.mark.parametrize(
    ("limit", "prompt", "needed"),
    [(8 * 40 + 100, 100, None), (8 * 40 + 16, 16, None), (8 * 40 + 99, 100, 420), (8 * 40 + 15, 16, 336)],
)
def test_the_longest_group_must_fit_a_batch(limit: int, prompt: int, needed: int | None) -> None:
    """A server without a model has the limit too."""
    sampling = SamplingConfig(num_generations=8, max_completion_length=40)
    for reference in (described(max_batch_tokens=limit), described(max_batch_tokens=limit, name="ref")):
        if needed is None:
            check_group_fits(reference, sampling, prompt)
        else:
            settings = "sampling.num_generations, sampling.max_completion_length"
            words = rf"^{settings}: 8 .* 40 .* {limit} .*--max-batch-tokens {needed}$"
            with pytest.raises(UserError, match=words):
                check_group_fits(reference, sampling, prompt)


def queue_of(**limits: int) -> QueueView:
    names = LimitsView.model_fields
    scoring = dict.fromkeys(ScoringView.model_fields, 0)
    return QueueView.model_validate(
        {"states": {}, "runs": {}, "oldest_age_seconds": None, "scoring": scoring,
         "limits": dict.fromkeys(names, 100) | limits}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "groups", "refusal"),
    [
        ({}, 50, None),
        ({"max_batches": 8}, 8, None),
        ({"max_batches": 8}, 9, "needs 9 groups and the server holds 8 at most.*--queue.max-batches "),
        ({"max_batches_per_run": 8}, 9, "holds 8 at most.*--queue.max-batches-per-run"),
        ({"max_in_flight": 8}, 4, None),
        ({"max_in_flight": 8}, 5, "at most half of the 8 batches.*--queue.max-in-flight .* to 10"),
        ({"max_in_flight_per_run": 9}, 5, "at most half of the 9 batches.*--queue.max-in-flight-per-run .* to 10"),
        ({"max_in_flight": 1}, 1, "at most half of the 1 batches"),
    ],
)
def test_a_step_must_fit_the_queue(limits: dict[str, int], groups: int, refusal: str | None) -> None:
    queue = queue_of(**limits)
    if refusal is None:
        check_room(queue, groups)
    else:
        with pytest.raises(UserError, match=f"^groups_per_step: .*{refusal}"):
            check_room(queue, groups)
