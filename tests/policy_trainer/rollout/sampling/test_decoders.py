"""Decoders: which models and prompts take which, and that all compute the same logits."""

import pytest
import torch

from policy_trainer.rollout.sampling import decoders
from policy_trainer.rollout.sampling.decoders import (
    CopiedPromptDecoder,
    Decoder,
    RepeatedCacheDecoder,
    SharedPromptDecoder,
    make_decoder,
)
from policy_trainer.rollout.sampling.hf import use_attention
from policy_trainer.rollout.sampling.kv_cache import GrowableLayer, prefill
from tests.policy_trainer.rollout.sampling.architectures import PROMPTS, SHARING, texts
from tests.rounding import rounding


@pytest.mark.parametrize("architecture", list(SHARING))
@pytest.mark.parametrize("prompts", [PROMPTS, [[7, 8, 9], [9, 8, 7]]], ids=["padded", "of one length"])
def test_all_decoders_compute_the_same_logits(
    architecture: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after rows have changed places, and after a whole group has left."""
    torch.manual_seed(3)
    model = SHARING[architecture]().eval()
    tokens = torch.arange(3 * len(prompts)) + 10
    computed = []
    groups = torch.arange(len(prompts)).repeat_interleave(3)
    for copied, kind in ((0, SharedPromptDecoder), (64, CopiedPromptDecoder), (0, RepeatedCacheDecoder)):
        monkeypatch.setattr(decoders, "_COPIED_TOKENS", copied)
        with torch.inference_mode():
            attention = kind is not RepeatedCacheDecoder
            decoder = make_decoder(model, prefill(model, texts(prompts), None), groups, decoding_attention=attention)
            assert type(decoder) is kind
            with use_attention(model, decoder.attention):
                logits = [decoder.step(tokens), decoder.step(tokens + 1)]
                for rows in (torch.tensor([5, 1, 2, 3]), torch.tensor([3, 0])):
                    decoder.select(rows)
                    logits += [decoder.step(tokens[: len(rows)]), decoder.step(tokens[-len(rows) :])]
        computed.append(logits)
    for shared, copied, repeated in zip(*computed, strict=True):
        bound = rounding(repeated.abs().max())
        assert (shared - repeated).abs().max() < bound
        assert (copied - repeated).abs().max() < bound


@pytest.mark.parametrize(("tokens", "kind"), [(64, CopiedPromptDecoder), (65, SharedPromptDecoder)])
def test_short_prompts_are_copied_and_long_ones_shared(tokens: int, kind: type[Decoder]) -> None:
    model = next(iter(SHARING.values()))().eval()
    with torch.inference_mode():
        prompts, groups = prefill(model, texts([[5] * tokens]), None), torch.tensor([0, 0])
        decoder = make_decoder(model, prompts, groups, decoding_attention=True)
    assert type(decoder) is kind


def test_a_row_that_joins_reads_nothing_that_no_row_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shorter than what the others have sampled since an earlier row left its slot, after the layer has grown."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *sizes: empty(*sizes).fill_(torch.nan))
    none = torch.zeros(0, dtype=torch.long)
    prompts = torch.ones(2, 1, 8, 4)
    layer = GrowableLayer(prompts, prompts)
    layer.select(1, none, none)
    for _ in range(5):
        layer.update(prompts[:1, :, :1], prompts[:1, :, :1])
    layer.join(prompts[:1, :, :2], prompts[:1, :, :2], 13)
    assert all(part.shape == (2, 1, 13, 4) and part.isfinite().all() for part in layer.kept())
