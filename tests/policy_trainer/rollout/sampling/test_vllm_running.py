"""Running batches on a fake vLLM server: rows that join and leave, and a server that breaks."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import RunningBatch, SamplingParams, WeightsLost, sample
from policy_trainer.rollout.sampling.vllm_server import put_to_sleep
from shared.errors import UserError
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm
from tests.policy_trainer.rollout.sampling.test_vllm_server import ABOUT_A_PICTURE, PARAMS, sampler_of
from tests.site import Answer

Make = Callable[..., Any]
GREEDY = SamplingParams(1, 1, temperature=0)


def finish(batch: RunningBatch) -> dict[int, tuple[list[int], list[float], bool, bool]]:
    """The completions of all rows that are left, as values that can be compared."""
    ended: dict[int, Completion] = {}
    while len(batch):
        ended |= dict(batch.advance())
    return {
        row: (item.ids.tolist(), item.logps.tolist(), item.finished, item.eos) for row, item in sorted(ended.items())
    }


def threads() -> int:
    return sum(thread.name == "vllm requests" for thread in threading.enumerate())


def test_completions_are_the_servers(fake: FakeVllm, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    """One for each row and turn, each with a seed of its own."""
    with sampler_of(fake).running_batch(PARAMS, 5) as batch:
        batch.add([4, 7], texts([[3, 4, 5]])[0], 12)
        batch.add([9], texts([[6, 7]])[0], 3)
        assert len(batch) == 3
        ended = finish(batch)
        assert list(ended) == [4, 7, 9] and batch.advance() == []
        batch.add([7], texts([[3, 4, 5]])[0], 12)
        again = finish(batch)
    assert threads() == 0
    assert all(body["n"] == 1 for body in fake.bodies)
    assert len({body["seed"] for body in fake.bodies}) == 4 and again != {7: ended[7]}
    (body,) = (body for body in fake.bodies if body["prompt"] == [6, 7])
    params = SamplingParams(1, 3, temperature=0.7)
    ((expected,),) = sample(HFSampler(make_tiny(), tokenizer), texts([[6, 7]]), params, body["seed"])
    assert ended[9] == (expected.ids.tolist(), expected.logps.tolist(), expected.finished, expected.eos)


def test_the_seed_decides(fake: FakeVllm) -> None:
    drawn = []
    for seed in (5, 5, 6):
        with sampler_of(fake).running_batch(PARAMS, seed) as batch:
            batch.add([0, 1], texts([[3, 4, 5]])[0], 12)
            drawn.append(finish(batch))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("broken", [None, Answer(503)])
def test_a_server_that_breaks_is_waited_for_and_changes_nothing(fake: FakeVllm, broken: Answer | None) -> None:
    """Also when the trainer takes the device meanwhile. Rows that have ended are not repeated."""
    fake.broken = broken
    waits: list[float] = []

    def wait(reason: str, seconds: float) -> None:
        assert f"the vLLM server at {fake.url} to answer" in reason
        waits.append(seconds)
        put_to_sleep(fake.url)

    drawn = []
    for breaks in (0, 2):
        with sampler_of(fake, wait, sleep_mode=True).running_batch(PARAMS, 5) as batch:
            batch.add([3], texts([[6]])[0], 12)
            first = finish(batch)
            fake.break_next = breaks
            batch.add([0, 1], texts([[3, 4, 5]])[0], 12)
            batch.add([2], texts([[6, 7]])[0], 12)
            drawn.append(first | finish(batch))
    assert drawn[0] == drawn[1] and 1 <= len(waits) <= 2 and not fake.faults
    assert threads() == 0


def test_on_wait_may_give_up(fake: FakeVllm) -> None:
    def give_up(reason: str, seconds: float) -> None:
        raise KeyboardInterrupt

    fake.break_next = 1
    with pytest.raises(KeyboardInterrupt), sampler_of(fake, give_up).running_batch(PARAMS, 5) as batch:
        batch.add([0], texts([[3]])[0], 12)
        finish(batch)
    assert threads() == 0


def test_lost_weights_and_refused_prompts_are_raised(fake: FakeVllm) -> None:
    sampler = sampler_of(fake)
    refused = pytest.raises(UserError, match="does not complete a prompt: 404")
    with refused, sampler.running_batch(PARAMS, 5) as batch:
        batch.add([0], ABOUT_A_PICTURE, 12)
        finish(batch)
    with sampler.running_batch(PARAMS, 5) as batch:
        batch.add([0], texts([[3]])[0], 12)
        finish(batch)
        fake.version = "other"
        batch.add([0], texts([[3]])[0], 12)
        with pytest.raises(WeightsLost, match="restarted"):
            finish(batch)
    assert threads() == 0


def test_the_caller_never_waits_long_and_what_is_under_way_is_left(fake: FakeVllm) -> None:
    with fake.busy:  # the server answers nothing
        with sampler_of(fake).running_batch(GREEDY, 5) as batch:
            batch.add([0], texts([[3]])[0], 12)
            began = time.monotonic()
            assert batch.advance() == [] and len(batch) == 1
            assert time.monotonic() - began < 5
        assert threads() == 0
