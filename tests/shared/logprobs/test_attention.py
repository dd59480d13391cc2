"""Packed attention against a softmax over what each token may see, in float64."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from shared.batch import TokenGroup
from shared.logprobs import choose_forward, varlen
from shared.logprobs.attention import (
    PACKED_ATTENTION,
    AttentionKind,
    Bounds,
    Packing,
    PackingContext,
    packed_attention,
)
from shared.logprobs.layout import PackedLayout
from shared.logprobs.stacked import StackedAttention
from shared.logprobs.varlen import VarlenAttention
from tests.device import DEVICE
from tests.rounding import rounding
from tests.shared.logprobs.families import FAMILIES, SHAPES, expected, make

SIZES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=12)), min_size=1, max_size=4
)

PLAIN = AttentionKind()


def window(size: int) -> Bounds:
    return Bounds(size, lambda query, key: (key <= query) & (key > query - size))


def chunks(size: int) -> Bounds:
    return Bounds(size, lambda query, key: (key <= query) & (key // size == query // size))


KINDS = st.builds(
    AttentionKind,
    st.one_of(st.none(), st.builds(window, st.integers(1, 50)), st.builds(chunks, st.integers(1, 50))),
    st.sampled_from([None, 0.5]),
    st.booleans(),
).filter(lambda kind: kind.softcap is None or not kind.sinks)


def layout_of(sizes: Sequence[tuple[int, Sequence[int]]]) -> PackedLayout:
    zeros = [(np.zeros(prompt, np.int64), np.zeros(sum(n), np.int64), np.array(n, np.int64)) for prompt, n in sizes]
    return PackedLayout.of([TokenGroup(*arrays) for arrays in zeros])


def states(tokens: int, heads: int, seed: int) -> Tensor:
    return torch.randn(tokens, heads, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """One token after the other: (N, H, D)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs = []
    for span in layout.spans:
        prompt = list(range(span.prompt.start, span.prompt.end)) if span.prompt else []
        for token in range(span.start, span.end):
            seen = torch.tensor([*prompt, *range(span.start, token + 1)])
            if kind.bounds:
                seen = seen[kind.bounds.visible(torch.tensor(len(seen) - 1), torch.arange(len(seen)))]
            scores = torch.einsum("hd,nhd->hn", query[token], key[seen]) * scale
            if kind.softcap is not None:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            shares = (scores if sinks is None else torch.cat([scores, sinks[:, None]], dim=1)).softmax(dim=1)
            outputs.append(torch.einsum("hn,nhd->hd", shares[:, : len(seen)], value[seen]))
    return torch.stack(outputs)


def assert_same_gradients(got: Tensor, want: Tensor, inputs: Sequence[Tensor]) -> None:
    for gradient, right in zip(*(torch.autograd.grad(loss, inputs) for loss in (got, want)), strict=True):
        assert (gradient - right).abs().max() < 1e-9


@settings(max_examples=20, deadline=None)
@given(SIZES, st.sampled_from([(2, 2), (4, 1), (4, 2)]), KINDS)
def test_stacked_attention(sizes: list[tuple[int, list[int]]], heads: tuple[int, int], kind: AttentionKind) -> None:
    layout = layout_of(sizes)
    tokens = layout.spans[-1].end
    query, key, value = (states(tokens, h, seed).requires_grad_() for seed, h in enumerate((heads[0], *heads[1:] * 2)))
    sinks = states(1, heads[0], 5)[0, :, 0].requires_grad_() if kind.sinks else None
    attention = StackedAttention(layout, dtype=torch.float64, device=DEVICE, kind=kind)
    got = attention(query, key, value, 0.3, 0.0, sinks)
    want = naive(layout, query, key, value, 0.3, kind, sinks)
    assert (got - want).abs().max() < 1e-9
    factors = states(tokens, heads[0], 9)
    inputs = [query, key, value, *([] if sinks is None else [sinks])]
    assert_same_gradients((got * factors).sum(), (want * factors).sum(), inputs)


@pytest.mark.parametrize(
    "sizes",
    [[(5, [1400])], [(700, [600, 3])], [(2000, [1] * 700)], [(1, [1])], [(3, [2] * 300), (90, [80, 1, 1, 7])]],
    ids=["blocks of one completion", "long prompt", "very many of one token", "smallest", "short and long"],
)
@pytest.mark.parametrize("kind", [PLAIN, AttentionKind(window(100)), AttentionKind(chunks(700), None, True)])
def test_stacked_attention_of_extreme_shapes(sizes: list[tuple[int, list[int]]], kind: AttentionKind) -> None:
    layout = layout_of(sizes)
    tokens = layout.spans[-1].end
    query, key, value = (states(tokens, 1, seed) for seed in range(3))
    sinks = torch.ones(1, dtype=torch.float64) if kind.sinks else None
    got = StackedAttention(layout, dtype=torch.float64, device=DEVICE, kind=kind)(query, key, value, None, 0.0, sinks)
    assert (got - naive(layout, query, key, value, 8**-0.5, kind, sinks)).abs().max() < 1e-9


def test_windows_and_chunks_are_told_apart() -> None:
    for size in (2, 7):
        assert window(size).slides and not chunks(size).slides


def keys_of_calls(monkeypatch: pytest.MonkeyPatch, layout: PackedLayout, kind: AttentionKind = PLAIN) -> list[int]:
    """For each call of SDPA that a packed attention makes: how many keys it gets, over all rows."""
    sdpa, counts = torch.nn.functional.scaled_dot_product_attention, []

    def count(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        counts.append(key.shape[0] * key.shape[2])
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    tokens = torch.zeros(layout.spans[-1].end, 1, 8)
    StackedAttention(layout, dtype=torch.float32, device=DEVICE, kind=kind)(tokens, tokens, tokens, None, 0.0)
    return counts


def test_a_window_leaves_out_the_keys_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 completions of 400 behind 4,000: a query's block gets at most its own tokens and a window before them."""
    layout = layout_of([(4000, [400] * 8)])
    assert sum(keys_of_calls(monkeypatch, layout, AttentionKind(window(64)))) < 2.5 * layout.spans[-1].end


def test_many_short_completions_share_copies_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 completions of one token behind 4,096: the keys of all calls are far fewer than 2,000 times 4,096."""
    keys = keys_of_calls(monkeypatch, layout_of([(4096, [1] * 2000)]))
    assert 4096 + 2000 <= sum(keys) < 10 * 4096


def test_a_slice_of_a_mask_is_that_of_all_tokens() -> None:
    bounds = Bounds.window(4)
    assert bounds[:, :, slice(0, None), :] is bounds
    with pytest.raises(NotImplementedError, match="some tokens"):
        bounds[:, :, slice(-1, None), :]


def test_packed_attention_refuses_what_it_would_ignore() -> None:
    zeros = torch.zeros(1, 1, 2, 4)
    packing = Packing(layout_of([(1, [1])]), StackedAttention, torch.float32)
    with PackingContext(packing), pytest.raises(NotImplementedError, match="position_bias"):
        packed_attention(torch.nn.Module(), zeros, zeros, zeros, None, position_bias=1)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_key: int,
    dropout: float, causal: bool, debug_mask: bool, *, scale: float | None, window_size_left: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What PyTorch documents of the CUDA kernel: packed sequences; causal means aligned at the last key."""
    assert causal and not dropout and not debug_mask
    assert ends.dtype == key_ends.dtype == torch.int32
    assert longest == max(np.diff(ends)) and longest_key == max(np.diff(key_ends))
    outputs = []
    for (a, b), (c, d) in zip(
        *(zip(e[:-1].tolist(), e[1:].tolist(), strict=True) for e in (ends, key_ends)), strict=True
    ):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        if window_size_left is not None:
            mask = mask.triu((d - c) - (b - a) - window_size_left)
        states = (query[a:b], key[c:d], value[c:d])
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                *(s.transpose(0, 1)[None] for s in states), attn_mask=mask, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs), torch.empty(0)


@pytest.mark.parametrize("kind", [PLAIN, AttentionKind(window(4))])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (4, 2)])
def test_varlen_layout_is_right(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], kind: AttentionKind) -> None:
    """With a CPU implementation of the kernel. Gradients reach the heads that several queries share."""
    layout = layout_of([(4, [5, 1, 3]), (1, [2]), (7, [6, 6])])
    tokens = layout.spans[-1].end
    query, key, value = (states(tokens, h, seed).requires_grad_() for seed, h in enumerate((heads[0], *heads[1:] * 2)))
    monkeypatch.setattr(varlen, "has_kernel", lambda dtype, device: True)
    monkeypatch.setattr(varlen, "_flash_attention", flash_attention)
    attention = VarlenAttention(layout, dtype=torch.float64, device=DEVICE, kind=kind)
    got, want = attention(query, key, value, 0.3, 0.0), naive(layout, query, key, value, 0.3, kind)
    assert (got - want).abs().max() < 1e-9
    assert_same_gradients(got.square().sum(), want.square().sum(), (query, key, value))


@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(chunks(4)),
        AttentionKind(softcap=2.0),
        AttentionKind(sinks=True),
        AttentionKind(Bounds.window(4, images=True)),
    ],
)
def test_varlen_attention_refuses_what_its_kernel_lacks(monkeypatch: pytest.MonkeyPatch, kind: AttentionKind) -> None:
    monkeypatch.setattr(varlen, "has_kernel", lambda dtype, device: True)
    with pytest.raises(NotImplementedError, match="no sinks, caps, chunks and images"):
        VarlenAttention(layout_of([(1, [1])]), dtype=torch.float64, device=DEVICE, kind=kind)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varlen_on_a_device(heads: tuple[int, int]) -> None:
    """Its error, and that of its gradients, is that of the 8 bits of bfloat16."""
    layout, device = layout_of([(40, [50, 1, 30]), (1, [2]), (70, [60, 60])]), torch.device("cuda")
    inputs = [states(layout.spans[-1].end, h, seed) for seed, h in enumerate((heads[0], *heads[1:] * 2))]
    attention = VarlenAttention(layout, dtype=torch.bfloat16, device=device, kind=PLAIN)
    theirs = [each.to(device, torch.bfloat16).requires_grad_() for each in inputs]
    query, key, value = theirs
    exact = [each.detach().cpu().double().requires_grad_() for each in theirs]
    got, want = attention(query, key, value, None, 0.0), naive(layout, exact[0], exact[1], exact[2], 8**-0.5)
    assert (got.cpu().double() - want).abs().max() < 5e-2
    got.float().square().sum().backward()
    want.square().sum().backward()
    for ours, right in zip(theirs, exact, strict=True):
        assert ours.grad is not None and right.grad is not None
        assert (ours.grad.cpu().double() - right.grad).norm() < 2e-2 * right.grad.norm()


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2", "gpt-neox", "granite", "gemma2"])
def test_the_model_still_generates(name: str) -> None:
    untouched, served = make(name), make(name)
    forward = choose_forward(served)
    assert forward.name == FAMILIES[name][1]
    # Two prompts, the shorter padded on the left, greedily with a cache.
    ids = torch.tensor([[5, 9, 33, 12, 7], [0, 0, 41, 3, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = untouched.generate(ids, **options)  # type: ignore[operator]
    forward(SHAPES["ragged"], [1.0])
    assert torch.equal(served.generate(ids, **options), want)  # type: ignore[operator]
    for model in (untouched, served):
        model.requires_grad_(False)
    hidden = torch.ones_like(ids)
    logits, want_logits = (model(ids, attention_mask=hidden).logits for model in (served, untouched))
    assert (logits - want_logits).abs().max() < rounding(want_logits.abs().max())


def test_a_saved_model_does_not_name_the_packed_attention(tmp_path: Path) -> None:
    model = make("qwen2")
    assert choose_forward(model).name == "packed"
    model.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    groups = SHAPES["ragged"]
    assert again.config._attn_implementation == "sdpa"
    assert (expected(again, groups, [1.0]) - expected(model, groups, [1.0])).abs().max() < 1e-9


def test_completions_continue_after_the_largest_position_of_their_prompt() -> None:
    """Which is less than the prompt's length where a picture's tokens share positions."""
    positions = layout_of([(5, [2, 1]), (2, [1])]).positions([np.array([[0, 1, 1, 1, 2]] * 3), np.array([[0, 1]] * 3)])
    assert positions.tolist() == [[0, 1, 1, 1, 2, 3, 4, 3, 0, 1, 2]] * 3
