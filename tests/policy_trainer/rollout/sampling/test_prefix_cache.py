"""What all prompts of a running batch begin with is computed once, and nobody sees a difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.rollout.sampling.decoders import make_decoder, use_attention
from policy_trainer.rollout.sampling.hf import HFSampler, choose_decoding
from policy_trainer.rollout.sampling.kv_cache import PrefilledPrompts, prefill
from policy_trainer.rollout.sampling.prefix_cache import PrefixCache
from policy_trainer.rollout.sampling.sampler import SamplingParams
from tests.policy_trainer.rollout.sampling.architectures import ARCHITECTURES, NO_TOKEN, generate, texts
from tests.rounding import rounding

PREFIX = [*range(7, 47)]
ENDINGS = [[5], [50, 51, 52, 53], [60, 61], [7, 8, 9, 10]]
PROMPTS = [PREFIX + ending for ending in ENDINGS]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel], list[tuple[int, int]]]:
    """Of a model: the shapes of the ids of its forwards, from now on."""

    def watch(model: PreTrainedModel) -> list[tuple[int, int]]:
        shapes: list[tuple[int, int]] = []
        forward = model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            shapes.append(tuple(kwargs["input_ids"].shape))
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", counted)
        return shapes

    return watch


def following(model: PreTrainedModel, prompts: PrefilledPrompts) -> list[Tensor]:
    """The logits after the prompts, and after each of three further tokens."""
    groups = torch.arange(len(prompts.mask))
    decoder = make_decoder(model, prompts, groups, choose_decoding(model))
    logits = [prompts.logits]
    with use_attention(model, decoder.attention):
        return logits + [decoder.step(groups + 10 + column) for column in range(3)]


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@torch.inference_mode()
def test_the_logits_are_those_of_whole_prompts(architecture: str) -> None:
    torch.manual_seed(3)
    model = ARCHITECTURES[architecture]().eval()
    cache = PrefixCache(model)
    for prompts in (PROMPTS, PROMPTS[1:2], PROMPTS[:3:2], [[9, 8, 7], PROMPTS[0]]):  # the last are no continuation
        expected = following(model, prefill(model, texts(prompts), None))
        for ours, theirs in zip(following(model, cache.prefill(texts(prompts))), expected, strict=True):
            bound = rounding(max(8, theirs.abs().max()), layers=model.config.num_hidden_layers)
            assert (ours - theirs).abs().max() < bound


@torch.inference_mode()
def test_only_what_follows_is_computed_for_each(make_tiny: Callable[..., Any], computed: Callable[..., Any]) -> None:
    model = make_tiny()
    shapes, cache = computed(model), PrefixCache(model)
    for prompts in (PROMPTS, [PROMPTS[0] + [3] * 9], [[1, 2], PROMPTS[0]], [PREFIX], [[*PREFIX, 2]]):
        cache.prefill(texts(prompts))
    assert shapes == [(1, 40), (4, 4), (1, 10), (2, 41), (1, 40), (1, 1)]


@torch.inference_mode()
def test_a_prompt_is_shared_from_the_second_time(make_tiny: Callable[..., Any], computed: Callable[..., Any]) -> None:
    """Nothing is known to follow the first; one that is not longer shares all but its last token."""
    model = make_tiny()
    shapes, cache = computed(model), PrefixCache(model)
    for prompt in (PROMPTS[1], PROMPTS[1] + [3, 4], PROMPTS[1], PREFIX[:20]):
        cache.prefill(texts([prompt]))
    assert shapes == [(1, 44), (1, 43), (1, 3), (1, 1), (1, 20)]


@pytest.mark.parametrize("prompts", [[[5], [6]], [PREFIX[:32], [*PREFIX[:31], 3]], [[3, *PREFIX], [4, *PREFIX]]])
@torch.inference_mode()
def test_prompts_with_less_in_common_are_computed_whole(
    prompts: list[list[int]], make_tiny: Callable[..., Any], computed: Callable[..., Any]
) -> None:
    model = make_tiny()
    shapes = computed(model)
    PrefixCache(model).prefill(texts(prompts))
    assert shapes == [(2, len(prompts[0]))]


def test_samples_are_those_of_generate(make_tiny: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows join at once and later, after a turn."""
    model = make_tiny(eos=NO_TOKEN)
    greedy, ended = SamplingParams(1, 1, temperature=0), {}
    with HFSampler(model, tokenizer).running_batch(greedy, 0) as batch:
        for row, prompt in enumerate(PROMPTS):
            batch.add([2 * row, 2 * row + 1], texts([prompt])[0], 4 + row)
        while len(batch):
            for row, completion in batch.advance():
                ended[row] = completion.ids.tolist()
                if row % 2 and row < 8:  # another turn
                    batch.add([row + 8], texts([PROMPTS[row // 2] + ended[row] + [4, 5, 6]])[0], 6)
    for row, prompt in enumerate(PROMPTS):
        first = generate(model, prompt, 4 + row)
        assert ended[2 * row] == ended[2 * row + 1] == first
        assert ended[2 * row + 9] == generate(model, prompt + first + [4, 5, 6], 6)
