"""Refused leases: whether another trainer of the run lives; the body of a lease request; batches with images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import LossConfig, TrainConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.queue_client.terms import BatchCheck, LeaseRefusals, LeaseTerms
from shared.api import Order
from shared.client import RefServerError
from shared.settings import from_values
from tests.shared.logprobs.families import make
from tests.shared.logprobs.vision_families import make_vision, with_images


def taken(retry_after: float) -> RefServerError:
    return RefServerError(409, "taken", code="run_taken", field="run", retry_after=retry_after)


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def refusals(clock: list[float]) -> LeaseRefusals:
    return LeaseRefusals("mine", lambda: clock[0])


def test_a_silent_trainer_is_waited_for(refusals: LeaseRefusals, clock: list[float]) -> None:
    assert refusals.reason is None
    for left in (60, 59, 58, 58, 56, 20, 1):  # as the server rounds up
        clock[0] = 160 - left
        assert refusals.refused(taken(left)) == 1
        assert refusals.reason == (
            "run 'mine' was trained by another trainer a moment ago: waiting up to 60 s to see whether it lives"
        )


def test_a_trainer_that_asks_again_lives(refusals: LeaseRefusals, clock: list[float]) -> None:
    refusals.refused(taken(10))
    clock[0] += 1
    refusals.refused(taken(10))  # within the rounding
    clock[0] += 1
    with pytest.raises(RunFailed) as failed:
        refusals.refused(taken(10))
    assert (failed.value.problem, failed.value.remedy) == (
        "run: another trainer trains a run named 'mine' on this server",
        "stop that one, or choose another name with --run, or another --run-dir",
    )


def test_its_last_lease_may_have_been_settled_meanwhile(refusals: LeaseRefusals, clock: list[float]) -> None:
    for seconds in (60, 10):
        refusals.refused(taken(seconds))
    clock[0] += 3
    with pytest.raises(RunFailed):
        refusals.refused(taken(10))


def test_a_copy_of_the_directory_is_named(refusals: LeaseRefusals) -> None:
    with pytest.raises(RunFailed, match="copy of this run's directory"):
        refusals.refused(RefServerError(409, "a newer incarnation", code="superseded"))


def test_other_refusals_are_raised_as_they_are(refusals: LeaseRefusals) -> None:
    with pytest.raises(RefServerError, match="no"):
        refusals.refused(RefServerError(422, "no", code="invalid_request"))


def test_the_body_of_a_lease_request() -> None:
    terms = LeaseTerms("trainer", "ours", epoch=3, max_lag=4, lease_seconds=30, order=Order.FRESHEST)
    body = terms.at(7, wait_seconds=2)
    assert (body.consumer, body.run, body.epoch, body.policy_version, body.max_lag) == ("trainer", "ours", 3, 7, 4)
    assert (body.order, body.wait_seconds, body.lease_seconds) == (Order.FRESHEST, 2, 30)
    assert body.incarnation == terms.at(8, wait_seconds=2).incarnation
    assert body.incarnation != LeaseTerms("trainer", "ours", 3, 4, 30).incarnation, "each process has its own"


def test_a_teacher_that_reads_more_needs_its_prompt(make_scored: Any) -> None:
    """Otherwise it would read the policy's."""
    data = {"teacher_prompt_template": "{prompt}{privileged_context}"}
    loss = {"advantage": "distill", "beta": 0}
    check = BatchCheck.of(make("qwen2"), from_values(TrainConfig, model="m", loss=loss, data=data), {})
    plain = make_scored([3, 4], [[5] * 4] * 4, range(4), ref_logps=[-1.0] * 16)
    assert str(check.refusal(plain)).startswith("it has no teacher_prompt_ids, which data.teacher_prompt_template")
    shown = replace(plain, group=replace(plain.group, teacher_prompt_ids=np.array([3])))
    assert check.refusal(replace(shown, teacher_logps=plain.ref_logps)) is None


def test_images_must_fit_the_policy(make_scored: Any) -> None:
    config = TrainConfig(model="m", max_steps=1, loss=LossConfig(beta=0))
    seeing, blind = (BatchCheck.of(model, config, {}) for model in (make_vision("qwen2_vl"), make("qwen2")))
    group = with_images(make_vision("qwen2_vl"), [4] * 4)
    plain = make_scored([3, 4], [[5] * 4] * 4, range(4))
    batch = replace(plain, group=group)
    assert seeing.refusal(batch) is None
    assert blind.refusal(batch) == "image must be absent: the policy takes no images"
    assert blind.refusal(plain) is None
    without = replace(batch, group=replace(group, images={}))
    assert str(seeing.refusal(without)).startswith("image is missing: the prompt has")
    larger = replace(batch, group=replace(group, images={**group.images, "image_grid_thw": np.array([[1, 2, 2]])}))
    assert str(seeing.refusal(larger)).startswith("image/image_grid_thw has 4 patches in all")
