"""Scores when memory does not suffice: forwards are halved until they fit, with the same results."""

import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ref_server.scoring.reference import DeviceLost, TooLarge
from ref_server.scoring.scorer import Scorer
from shared.batch import TokenGroup
from shared.logprobs import ServingForward, choose_forward
from tests.rounding import rounding

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]


class Small:
    """A correct forward on a device with room for so many tokens."""

    name = "small"

    def __init__(self, forward: ServingForward, tokens: int, error: Exception) -> None:
        self._forward = forward
        self._tokens = tokens
        self._error = error
        self.seen: list[list[int]] = []

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        self._check(groups)
        return self._forward(groups, temperatures)

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def with_likeliest(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check(groups)
        return self._forward.with_likeliest(groups, temperatures)

    def _check(self, groups: Sequence[TokenGroup]) -> None:
        if sum(group.tokens for group in groups) > self._tokens:
            raise self._error
        self.seen.append([group.size for group in groups])


@pytest.fixture(scope="module")
def forward(model: PreTrainedModel) -> ServingForward:
    return choose_forward(model)


def groups_of(*shapes: tuple[int, Sequence[int]]) -> list[TokenGroup]:
    generator = np.random.default_rng(7)
    return [
        TokenGroup(generator.integers(0, 260, prompt), generator.integers(0, 260, sum(lengths)), np.array(lengths))
        for prompt, lengths in shapes
    ]


GROUPS = groups_of((5, (7, 1, 9, 30, 2)), (3, (4,)), (40, (1, 1, 1)), (8, (25, 3)), (6, (11, 12, 13)))
TEMPERATURES = [1.0, 0.5, 2.0, 1.0, 0.7]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: f"{type(error).__name__} {str(error)[:30]}")
@pytest.mark.parametrize("tokens", [41, 100])
def test_a_forward_that_does_not_fit_is_done_in_parts(forward: ServingForward, tokens: int, error: Exception) -> None:
    whole = Scorer(forward, 3, "cpu").score(GROUPS, TEMPERATURES)
    assert (whole.splits, whole.reference_version) == (0, 3)
    small = Small(forward, tokens, error)
    parts = Scorer(small, 3, "cpu").score(GROUPS, TEMPERATURES)
    assert parts.splits == len(small.seen) - 1
    assert sum(map(sum, small.seen)) == sum(group.size for group in GROUPS)
    assert parts.reference_version == 3
    assert whole.likeliest is None and whole.likeliest == parts.likeliest
    for group, left, right in zip(GROUPS, whole.logps, parts.logps, strict=True):
        assert right.dtype == np.float32
        assert len(right) == len(group.completion_ids)
        np.testing.assert_allclose(right, left, rtol=0, atol=rounding(16))


def test_the_likeliest_tokens_of_parts(forward: ServingForward) -> None:
    whole = Scorer(forward, 3, "cpu").score(GROUPS, TEMPERATURES, likeliest=True).likeliest
    parts = Scorer(Small(forward, 41, OUT_OF_MEMORY[0]), 3, "cpu").score(GROUPS, TEMPERATURES, likeliest=True).likeliest
    assert whole is not None and parts is not None
    for group, left, right in zip(GROUPS, whole, parts, strict=True):
        assert right.tokens.shape == right.logps.shape == group.completion_ids.shape
        np.testing.assert_array_equal(right.tokens, left.tokens)
        np.testing.assert_allclose(right.logps, left.logps, rtol=0, atol=rounding(16))


def test_a_single_completion_that_does_not_fit(forward: ServingForward) -> None:
    small = Small(forward, 30, OUT_OF_MEMORY[0])
    with pytest.raises(TooLarge, match="a row of 35 tokens, for which the memory of the device does not suffice"):
        Scorer(small, 0, "cpu").score(GROUPS[:1], TEMPERATURES[:1])


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_lost_device_differs_from_a_bad_batch(forward: ServingForward, error: Exception) -> None:
    with pytest.raises(DeviceLost):
        Scorer(Small(forward, 0, error), 0, "cpu").score(GROUPS, TEMPERATURES)
    with pytest.raises(RuntimeError, match="no such kernel"):
        Scorer(Small(forward, 0, RuntimeError("no such kernel")), 0, "cpu").score(GROUPS, TEMPERATURES)


def test_a_forward_that_failed_holds_no_memory(forward: ServingForward) -> None:
    held: weakref.WeakSet[Tensor] = weakref.WeakSet()
    before: list[int] = []

    class Holding:
        name = "holding"

        def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
            before.append(len(held))
            tensor = torch.zeros(1)
            held.add(tensor)
            if len(groups) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(groups, temperatures) + tensor

    assert Scorer(cast(ServingForward, Holding()), 0, "cpu").score(GROUPS[:4], TEMPERATURES[:4]).splits == 3
    assert before == [0] * 7


_LIMITED = """
import resource, sys
import numpy as np, torch
from policy_trainer.cli.demo.base_model import make_model
from ref_server.scoring.scorer import Scorer
from shared.batch import TokenGroup
from shared.logprobs import choose_forward

torch.set_num_threads(1)
scorer = Scorer(choose_forward(make_model(0).eval()), 0, "cpu")
ids = np.random.default_rng(0).integers(0, 260, 10 + 64 * 200)
group = TokenGroup(ids[:10], ids[10:], np.full(64, 200))
few = TokenGroup(ids[:10], ids[10 : 10 + 2 * 200], np.full(2, 200))
scorer.score([few], [1.0])  # what a first forward keeps
room = resource.RLIM_INFINITY
if sys.argv[1] != "all":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    room = used + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
scores = scorer.score([group], [1.0])
sys.stdout.buffer.write(scores.splits.to_bytes(4, "little") + scores.logps[0].tobytes())
"""


def score_within(mib: str) -> tuple[int, np.ndarray]:
    """Splits and log-probs of one group, by a process that may take only so much more memory."""
    output = subprocess.run([sys.executable, "-c", _LIMITED, mib], stdout=subprocess.PIPE, check=True).stdout
    return int.from_bytes(output[:4], "little"), np.frombuffer(output[4:], dtype=np.float32)


@pytest.mark.slow
def test_a_process_without_memory_scores_in_parts() -> None:
    splits, whole = score_within("all")
    assert splits == 0
    splits, parts = score_within("40")
    assert splits > 0
    np.testing.assert_allclose(parts, whole, rtol=0, atol=rounding(16))
