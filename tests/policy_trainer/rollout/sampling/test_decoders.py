"""Decoders: which models and prompts take which, and that all compute the same logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policy_trainer.rollout.sampling import decoders
from policy_trainer.rollout.sampling.decoders import (
    CopiedPromptDecoder,
    Decoder,
    Decoding,
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
    """Also after rows have changed places, after a whole group has left, and beyond the windows."""
    torch.manual_seed(3)
    model = SHARING[architecture]().eval()
    tokens = torch.arange(3 * len(prompts)) + 10
    computed = []
    groups = torch.arange(len(prompts)).repeat_interleave(3)
    for copied, decoding, kind in (
        (0, Decoding.SHARED, SharedPromptDecoder),
        (64, Decoding.SHARED, CopiedPromptDecoder),
        (0, Decoding.REPEATED, RepeatedCacheDecoder),
    ):
        monkeypatch.setattr(decoders, "_COPIED_TOKENS", copied)
        with torch.inference_mode():
            decoder = make_decoder(model, prefill(model, texts(prompts), None), groups, decoding)
            assert type(decoder) is kind
            with use_attention(model, decoder.attention):
                logits = [decoder.step(tokens), decoder.step(tokens + 1)]
                for rows in (torch.tensor([5, 1, 2, 3]), torch.tensor([3, 0])):
                    decoder.select(rows)
                    logits += [decoder.step(tokens[: len(rows)] + place) for place in range(3)]
        computed.append(logits)
    for shared, copied, repeated in zip(*computed, strict=True):
        bound = rounding(max(8, repeated.abs().max()), layers=model.config.num_hidden_layers)
        assert (shared - repeated).abs().max() < bound
        assert (copied - repeated).abs().max() < bound


@pytest.mark.parametrize(("tokens", "kind"), [(64, CopiedPromptDecoder), (65, SharedPromptDecoder)])
def test_short_prompts_are_copied_and_long_ones_shared(tokens: int, kind: type[Decoder]) -> None:
    model = next(iter(SHARING.values()))().eval()
    with torch.inference_mode():
        prompts, groups = prefill(model, texts([[5] * tokens]), None), torch.tensor([0, 0])
        decoder = make_decoder(model, prompts, groups, Decoding.SHARED)
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
    short = SimpleNamespace(keys=prompts[:, :, :2], values=prompts[:, :, :2])
    layer.join(short, torch.tensor([0]), 13)
    assert all(part.shape == (2, 1, 13, 4) and part.isfinite().all() for part in layer.kept())


def test_a_window_keeps_no_more_columns_than_it_reaches() -> None:
    """However long the rows become, and after one has joined."""
    numbers = torch.arange(100.0).view(1, 1, 100, 1)
    layer = GrowableLayer(numbers[:, :, :9], numbers[:, :, :9], window=4)
    room = 0
    for token in range(9, 90):
        keys, values = layer.update(numbers[:, :, token : token + 1], numbers[:, :, token : token + 1])
        assert keys.flatten().tolist() == values.flatten().tolist() == [token - 3, token - 2, token - 1, token]
        room = max(room, layer._slots[0].shape[2])
        if token == 40:
            layer.join(SimpleNamespace(keys=numbers[:, :, 80:93], values=numbers[:, :, 80:93]), torch.tensor([0]), 32)
            assert layer.kept()[0][1].flatten().tolist() == [89, 90, 91, 92]
            layer.select(1, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert room < 50
    assert layer.get_seq_length() == 32 + 49


def test_a_frozen_heads_weight_is_not_copied_for_each_row() -> None:
    """PyTorch would, for a view of the hidden states of several prompts."""
    model, contiguous = next(iter(SHARING.values()))().requires_grad_(False), list[bool]()
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: contiguous.append(inputs[0].is_contiguous()))
    prefill(model, texts([[5, 6, 7], [8, 9]]), None)
    assert contiguous == [True] and not head._forward_pre_hooks
