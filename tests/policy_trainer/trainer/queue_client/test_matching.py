"""Refused: a reference with another vocabulary or tokenizer, a server too small for a group or a step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import DataConfig, LoraConfig, LossConfig, ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.queue_client.matching import (
    check_first_kl,
    check_group_fits,
    check_models_match,
    check_reference,
    check_room,
)
from shared.api import ModelInfo
from shared.errors import UserError
from shared.logprobs import PackedForward
from shared.models import tokenizer_fingerprint
from shared.settings import from_values
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.queues import queue_of


def described(**known: Any) -> ModelInfo:
    """A reference model of which only these fields are known."""
    limits = {"max_batch_tokens": 1000, "max_image_bytes": 0}
    return ModelInfo.model_validate(dict.fromkeys(ModelInfo.model_fields) | limits | known)


def test_the_same_vocabulary_and_tokenizer(make_tiny: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny(vocabulary=len(tokenizer))
    reference = described(
        name="ref", vocabulary_size=len(tokenizer), tokenizer_fingerprint=tokenizer_fingerprint(tokenizer)
    )
    check_models_match(reference, model, tokenizer, "mine")
    check_models_match(described(), model, tokenizer, "mine")  # a server without a model
    check_models_match(reference.model_copy(update={"vocabulary_size": 300}), model, tokenizer, "mine")
    with pytest.raises(UserError, match=r"^model: mine has a vocabulary of 265 tokens.* ref has 264"):
        check_models_match(reference.model_copy(update={"vocabulary_size": 264}), model, tokenizer, "mine")
    with pytest.raises(UserError, match=r"^model: the tokenizer of mine is not that of .* ref"):
        check_models_match(reference.model_copy(update={"tokenizer_fingerprint": "other"}), model, tokenizer, "mine")


DISTILL = {"advantage": "distill"}
SHOWN: dict[str, Any] = {"teacher_prompt_template": "{prompt}{privileged_context}"}
APART = {"lora": {"rank": 2}, "reference": {"source": "adapter-off"}}


def test_a_reference_that_nothing_uses_is_not_renewed() -> None:
    renewed = {"loss": {**DISTILL, "beta": 0}, "data": SHOWN, "reference": {"sync_steps": 2, "snapshot_root": "s"}}
    config = from_values(TrainConfig, model="mine", server="http://far:8400", **renewed)
    check_reference(described(name="mine"), config)
    with pytest.raises(UserError, match=r"^reference\.sync_steps: the server has a teacher of its own, wise, so "):
        check_reference(described(name="mine", teacher="wise"), config)


@pytest.mark.parametrize(
    ("settings", "server", "words"),
    [
        ({}, {}, "it has no reference model .*serve --model mine`,.*--loss.beta 0$"),
        ({"loss": {"kl_in": "reward"}}, {}, "it has no reference model "),
        ({}, {"name": "ref"}, None),
        ({"loss": {"beta": 0}}, {}, None),
        (APART, {}, None),
        ({"loss": {**DISTILL, "beta": 0}}, {}, "it has no model .*serve --model TEACHER`$"),
        ({"loss": {**DISTILL, "beta": 0}, "data": SHOWN}, {}, "it has no model .*serve --model mine`$"),
        (
            {"loss": DISTILL},
            {"name": "ref"},
            "ref, is the reference.* --model mine --teacher TEACHER`, .*beta 0$",
        ),
        ({"loss": {**DISTILL, "beta": 0}}, {"name": "ref"}, None),
        ({"loss": DISTILL}, {"name": "ref", "teacher": "wise"}, None),
        ({"loss": DISTILL, "data": SHOWN}, {"name": "ref"}, None),
    ],
)
def test_the_server_has_the_models_that_the_loss_needs(
    settings: dict[str, Any], server: dict[str, str], words: str | None
) -> None:
    config = from_values(TrainConfig, model="mine", server="http://far:8400", **settings)
    if words is None:
        check_reference(described(**server), config)
    else:
        with pytest.raises(UserError, match=f"^server: .*{words}"):
            check_reference(described(**server), config)


@pytest.mark.parametrize(
    ("loss", "server", "teacher"),
    [
        ({**DISTILL, "beta": 0}, {"name": "wise"}, "wise"),
        ({**DISTILL, "beta": 0}, {"name": "ref", "teacher": "wise"}, "wise"),
        (DISTILL, {"name": "mine", "teacher": "wise"}, "wise"),
    ],
)
def test_a_teacher_that_is_given_must_be_that_of_the_server(
    loss: dict[str, Any], server: dict[str, str], teacher: str
) -> None:
    config = from_values(TrainConfig, model="mine", server="http://far:8400", loss=loss, teacher=teacher)
    check_reference(described(**server), config)
    with pytest.raises(UserError, match=f"^teacher: the server's teacher is {teacher}, but the setting is other"):
        check_reference(described(**server), config.model_copy(update={"teacher": "other"}))


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
            words = rf"^{settings}: 8 .* 40 .* {limit} .*`ref-server serve --max-batch-tokens {needed}`$"
            with pytest.raises(UserError, match=words):
                check_group_fits(reference, sampling, prompt)


@pytest.mark.parametrize(
    ("limits", "groups", "refusal"),
    [
        ({}, 50, None),
        ({"max_batches": 8}, 8, None),
        ({"max_batches": 8}, 9, "needs 9 groups and the server holds 8 at most.*`--queue.max-batches` "),
        ({"max_batches_per_run": 8}, 9, "holds 8 at most.*--queue.max-batches-per-run"),
        ({"max_in_flight": 8}, 4, None),
        ({"max_in_flight": 8}, 5, "at most half of the 8 batches.*`--queue.max-in-flight` .* to 10"),
        ({"max_in_flight_per_run": 9}, 5, "at most half of the 9 batches.*`--queue.max-in-flight-per-run` .* to 10"),
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


Make = Callable[..., Any]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def check(policy: PreTrainedModel, reference: PreTrainedModel, make_scored: Make, /, **settings: Any) -> str | None:
    """The message about the first batch of a policy that the reference has scored."""
    config = TrainConfig(model="ours", **settings)
    prompt = [3, 4]
    completions = [np.random.default_rng(row).integers(2, 64, 9).tolist() for row in range(4)]
    unscored = make_scored(prompt, completions, [0.0, 1.0, 0.0, 1.0])
    with torch.no_grad():
        logps = PackedForward(reference)([unscored.group], [1.0]).float().numpy()
    batch = make_scored(prompt, completions, [0.0, 1.0, 0.0, 1.0], ref_logps=logps)
    learner = make_learner(policy, loss=LossConfig(beta=0.1))
    info = ModelInfo.model_construct(name="theirs", dtype=NAMES[reference.dtype], teacher=None)
    return check_first_kl(config, info, NAMES[policy.dtype], learner.kl([batch]), learner.noise_floor([batch]))


@pytest.mark.parametrize("policy", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", [torch.float32, torch.bfloat16])
def test_equal_models_are_never_refused(
    policy: torch.dtype, reference: torch.dtype, make_tiny: Make, make_scored: Make
) -> None:
    for seed in range(3):
        message = check(make_tiny(seed=seed, dtype=policy), make_tiny(seed=seed, dtype=reference), make_scored)
        assert message and "the policy begins as the reference" in message and "nats a token" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_is_refused_with_both_figures_and_what_to_do(
    dtype: torch.dtype, make_tiny: Make, make_scored: Make
) -> None:
    with pytest.raises(RunFailed) as refused:
        check(make_tiny(dtype=dtype), make_tiny(seed=1, dtype=dtype), make_scored)
    message = str(refused.value)
    assert "theirs" in message and "nats a token (from rounding: " in message
    assert "ref-server serve --model ours" in message and "--expect-reference different" in message
    assert len(message.splitlines()) <= 5


def test_a_server_in_another_precision_is_to_have_the_policys(make_tiny: Make, make_scored: Make) -> None:
    with pytest.raises(RunFailed, match="ref-server serve --model ours --dtype bfloat16`"):
        check(make_tiny(dtype=torch.bfloat16), make_tiny(seed=1), make_scored)


def test_rounding_of_pretrained_weights_is_no_other_model() -> None:
    """5e-3 nats were measured between bfloat16 and float32, on odd text; another seed or size is 0.1 apart and more."""
    config = TrainConfig(model="ours", loss=LossConfig(beta=0.1))
    reference = ModelInfo.model_construct(name="theirs", dtype="float32", teacher=None)
    assert "begins as the reference" in str(check_first_kl(config, reference, "bfloat16", 0.02, 0.0))
    for dtype, kl in (("bfloat16", 0.06), ("float32", 0.02)):
        with pytest.raises(RunFailed):
            check_first_kl(config, reference, dtype, kl, 0.0)


def test_so_is_one_that_was_trained_a_little(make_tiny: Make, make_scored: Make) -> None:
    policy = make_tiny()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    with pytest.raises(RunFailed):
        check(policy, make_tiny(), make_scored)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expect_reference": "different"}, "KL to the reference before the first update: "),
        ({"loss": LossConfig(beta=0)}, None),
        ({"loss": LossConfig(beta=0, advantage="distill"), "teacher": "t"}, "KL to the teacher before the first"),
        (
            {
                "loss": LossConfig(beta=0, advantage="distill"),
                "data": DataConfig(**SHOWN),
                "expect_reference": "different",
            },
            "KL to the reference before the first update: ",
        ),
        ({"lora": LoraConfig(rank=2), "reference": ReferenceConfig(source="adapter-off")}, "the reference is the pol"),
    ],
)
def test_another_model_on_purpose_or_without_a_penalty_is_not(
    settings: dict[str, Any], message: str | None, make_tiny: Make, make_scored: Make
) -> None:
    got = check(make_tiny(), make_tiny(seed=1), make_scored, **settings)
    assert got is message is None or (got and message and got.startswith(message))


def test_a_policy_that_teaches_itself_begins_as_the_servers_model(make_tiny: Make, make_scored: Make) -> None:
    """Also without a penalty."""
    settings = {"loss": LossConfig(beta=0, advantage="distill"), "data": DataConfig(**SHOWN)}
    assert "begins as the reference" in str(check(make_tiny(), make_tiny(), make_scored, **settings))
    with pytest.raises(RunFailed):
        check(make_tiny(), make_tiny(seed=1), make_scored, **settings)
