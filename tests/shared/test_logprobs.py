"""Log-probs against the plainest computation there is: one row, one position at a time, in float64."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from shared import logprobs
from shared.batch import TokenGroup
from shared.logprobs import (
    PACKED_ATTENTION,
    LogprobForward,
    PackedForward,
    PlainForward,
    choose_forward,
    embedding_rows,
    self_test_difference,
)
from shared.refusal import Refused

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform, so that what is wrong is wrong by much
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
RECURRENT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "initializer_range": 0.3,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def common(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **changes}


FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen2": (Qwen2Config(**COMMON), "packed"),
    "qwen2-tied": (Qwen2Config(**common(tie_word_embeddings=True)), "packed"),
    "qwen3": (Qwen3Config(**COMMON), "packed"),
    "llama": (LlamaConfig(**COMMON), "packed"),
    "mistral": (MistralConfig(**COMMON, sliding_window=None), "packed"),
    "mistral-window": (MistralConfig(**COMMON, sliding_window=4), "plain"),
    "mixtral": (MixtralConfig(**COMMON, sliding_window=None, num_local_experts=4), "packed"),
    "phi3": (Phi3Config(**COMMON), "packed"),
    "olmo2": (Olmo2Config(**COMMON), "packed"),
    "gpt2": (GPT2Config(**GPT2), "packed"),
    "gpt-neox": (
        GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}),
        "packed",
    ),
    "gptj": (GPTJConfig(**GPT2, rotary_dim=4), "plain"),
    "granite": (GraniteConfig(**COMMON, logits_scaling=8.0), "plain"),
    "cohere": (CohereConfig(**COMMON), "plain"),
    "nanochat": (NanoChatConfig(**common(num_key_value_heads=4)), "plain"),
    "gemma2": (Gemma2Config(**COMMON, sliding_window=4, query_pre_attn_scalar=8), "plain"),
    "gemma3": (Gemma3TextConfig(**COMMON, sliding_window=4, query_pre_attn_scalar=8), "plain"),
    "mamba": (MambaConfig(**RECURRENT), "plain"),
    "mamba2": (Mamba2Config(**RECURRENT, num_heads=8, head_dim=8, n_groups=1), "plain"),
}
PACKED = [name for name, (_, forward) in FAMILIES.items() if forward == "packed"]


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family, in evaluation mode."""
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[name][0])
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def group(prompt: int, lengths: Sequence[int], seed: int = 0) -> TokenGroup:
    ids = np.random.default_rng([seed, prompt, *lengths]).integers(0, VOCABULARY, size=prompt + sum(lengths))
    return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths, np.int64))


SHAPES: dict[str, list[TokenGroup]] = {
    "one completion": [group(5, [7])],
    "one token": [group(1, [1])],
    "prompt of one": [group(1, [3, 1, 6])],
    "rows of one": [group(4, [1, 1, 1])],
    "equal lengths": [group(6, [5, 5, 5, 5])],
    "ragged": [group(9, [1, 12, 4, 7])],
    "many groups": [group(3 + seed, [1 + seed, 8 - seed, 3], seed) for seed in range(6)],
    "long": [group(60, [90, 3]), group(2, [70])],
}


def mixed(groups: list[TokenGroup]) -> list[float]:
    return [(1.0, 0.7, 1.9)[index % 3] for index in range(len(groups))]


def oracle(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    """(sum of C,) float64. Differentiable: gradients reach `model`, which should be a float64 copy."""
    logps = []
    for one, temperature in zip(groups, temperatures, strict=True):
        for completion in one.completions():
            row = [int(token) for token in (*one.prompt_ids, *completion)]
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            for position in range(len(one.prompt_ids), len(row)):
                distribution = torch.log_softmax(logits[position - 1] / temperature, dim=-1)
                logps.append(distribution[row[position]])
    return torch.stack(logps)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # the grouped matrix products know no float64
    return double


def expected(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    with torch.no_grad():
        return oracle(in_double(model), groups, temperatures)


def gradients(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def weights(count: int) -> Tensor:
    """What the loss weighs each log-prob by: signs and sizes as of advantages."""
    return torch.tensor(np.random.default_rng(1).normal(size=count), dtype=torch.float32)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", [PackedForward, PlainForward])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_equals_the_oracle(name: str, form: type[PackedForward | PlainForward], shape: str) -> None:
    model, groups = make(name), SHAPES[shape]
    want = expected(model, groups, mixed(groups))
    got = form(model)(groups, mixed(groups))
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert (got - want).abs().max() < 2e-5
    assert len(want) == 1 or want.std() > 0.5  # the oracle tells right from wrong


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_served_right(name: str) -> None:
    """Deep in rows longer than those of the self-test, too."""
    model = make(name)
    groups = [group(30, [40, 1, 17]), group(3, [9, 2])]
    want = expected(model, groups, mixed(groups))
    before = model.config._attn_implementation
    forward = choose_forward(model)
    assert forward.name == FAMILIES[name][1]
    with torch.no_grad():
        assert (forward(groups, mixed(groups)) - want).abs().max() < 2e-5
    # What was refused leaves the model as it was.
    assert model.config._attn_implementation == (PACKED_ATTENTION if forward.name == "packed" else before)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_family_is_served_right_however_small_its_weights(name: str, scale: float) -> None:
    """A wrong forward of a model whose log-probs hardly spread is wrong by little, and must be refused all the same."""
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, dtype, initializer_range=scale)
        assert choose_forward(model).name == FAMILIES[name][1]


def test_no_cap_on_logits_escapes() -> None:
    """At the start logits are far below the cap; a trained model's are not."""
    model = make("nanochat")
    forward = choose_forward(model)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(30)
    groups = SHAPES["ragged"]
    with torch.no_grad():
        assert (forward(groups, [1.0]) - expected(model, groups, [1.0])).abs().max() < 2e-5


def test_a_window_longer_than_the_self_test_is_seen() -> None:
    for name in ("mistral-window", "gemma3"):
        assert choose_forward(make(name, sliding_window=200)).name == "plain"


# Both stretch beyond 32 positions.
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
ROPES: dict[str, PretrainedConfig] = {
    "longrope": Phi3Config(
        **COMMON,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **LONG},
    ),
    "dynamic": LlamaConfig(
        **common(max_position_embeddings=32),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_a_long_row_leaves_the_frequencies_of_others_alone(rope: str) -> None:
    """These ropes stretch once a forward holds a row beyond the original context, and stretch it for every row."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ROPES[rope]).eval()
    forward = choose_forward(model)
    groups = [group(8, [10, 5]), group(20, [40, 1]), group(3, [2])]
    with torch.no_grad():
        assert (forward(groups, mixed(groups)) - expected(model, groups, mixed(groups))).abs().max() < 2e-5


def test_plain_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = make("qwen2"), SHAPES["many groups"]
    want = expected(model, groups, mixed(groups))
    for tokens in (1, 12, 40):
        monkeypatch.setattr(logprobs, "PLAIN_ROW_TOKENS", tokens)
        assert (PlainForward(model)(groups, mixed(groups)) - want).abs().max() < 2e-5
        lengths = [13, 2, 9, 9, 1, 30]
        batches = list(logprobs._micro_batches(lengths, tokens))
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= tokens


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    groups = SHAPES["many groups"]
    whole, chunked = make("qwen2-tied"), make("qwen2-tied")
    loss = PackedForward(whole)(groups, mixed(groups))
    (loss * weights(len(loss))).sum().backward()
    monkeypatch.setattr(logprobs, "HEAD_CHUNK_LOGITS", rows * VOCABULARY)
    again = PackedForward(chunked)(groups, mixed(groups))
    (again * weights(len(loss))).sum().backward()
    assert (loss - again).abs().max() < 5e-6
    assert (gradients(whole) - gradients(chunked)).norm() < 1e-5 * gradients(whole).norm()


@pytest.mark.parametrize("form", [PackedForward, PlainForward])
def test_groups_do_not_see_each_other(form: type[PackedForward | PlainForward]) -> None:
    forward, groups = form(make("qwen2")), SHAPES["many groups"]
    with torch.no_grad():
        together = forward(groups, mixed(groups)).split([len(one.completion_ids) for one in groups])
        backwards = forward(groups[::-1], mixed(groups)[::-1]).split([len(one.completion_ids) for one in groups[::-1]])
        for index, (one, temperature) in enumerate(zip(groups, mixed(groups), strict=True)):
            alone = forward([one], [temperature])
            assert (alone - together[index]).abs().max() < 1e-5
            assert (alone - backwards[-1 - index]).abs().max() < 1e-5


def test_completions_do_not_see_each_other() -> None:
    forward = PackedForward(make("qwen2"))
    first = group(5, [6, 4, 3])
    changed = first.completion_ids.copy()
    changed[6:10] = (changed[6:10] + 1) % VOCABULARY
    second = TokenGroup(first.prompt_ids, changed, first.completion_lengths)
    with torch.no_grad():
        a, b = forward([first], [1.0]), forward([second], [1.0])
    assert torch.equal(a[:6], b[:6])
    assert torch.equal(a[10:], b[10:])
    assert not torch.allclose(a[6:10], b[6:10])


def test_arrays_may_be_read_only() -> None:
    """As those are that come out of a decoded batch."""
    one = group(4, [3, 2])
    for array in (one.prompt_ids, one.completion_ids, one.completion_lengths):
        array.setflags(write=False)
    for form in (PackedForward, PlainForward):
        form(make("qwen2"))([one], [1.0])


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "qwen3", "gpt2", "mixtral"])
def test_gradients(name: str) -> None:
    groups = [group(9, [1, 12, 4]), group(1, [3, 6])]
    temperatures = [1.0, 0.7]
    packed, plain, naive = make(name), make(name), in_double(make(name))
    want = oracle(naive, groups, temperatures)
    factors = weights(len(want))
    (want * factors).sum().backward()
    (PlainForward(plain)(groups, temperatures) * factors).sum().backward()
    (PackedForward(packed)(groups, temperatures) * factors).sum().backward()
    norm = gradients(naive).norm()
    assert norm > 0.1
    assert (gradients(packed) - gradients(naive)).norm() < 1e-5 * norm
    assert (gradients(plain) - gradients(naive)).norm() < 1e-5 * norm
    assert (gradients(packed) - gradients(plain)).norm() < 1e-5 * norm


def test_gradients_with_checkpointed_layers() -> None:
    groups = SHAPES["ragged"]
    usual, checkpointed = make("qwen2"), make("qwen2")
    enable = (
        getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable
    )
    enable()
    for model in (usual, checkpointed):
        PackedForward(model.train())(groups, [1.0]).sum().backward()
    assert (gradients(usual) - gradients(checkpointed)).norm() < 1e-6 * gradients(usual).norm()


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    with torch.no_grad():
        assert not PackedForward(make("qwen2"))(SHAPES["ragged"], [1.0]).requires_grad


# ---------------------------------------------------------------- KL of a policy with itself is 0


@pytest.mark.parametrize("form", [PackedForward, PlainForward])
def test_a_model_does_not_differ_from_itself(form: type[PackedForward | PlainForward]) -> None:
    groups = [*SHAPES["many groups"], *SHAPES["long"]]
    temperatures = mixed(groups)
    policy, reference = form(make("qwen2").train()), form(make("qwen2"))
    logps = policy(groups, temperatures).detach()
    with torch.no_grad():
        together = reference(groups, temperatures)
        apart = torch.cat([reference([one], [t]) for one, t in zip(groups, temperatures, strict=True)])
    for ref_logps in (together, apart):
        x = (ref_logps - logps).double()
        assert x.abs().max() < 1e-5
        assert (torch.expm1(x) - x).max() < 1e-9  # k3, per token


def test_the_two_forms_in_bfloat16() -> None:
    groups = SHAPES["many groups"]
    packed, plain = make("qwen2", torch.bfloat16), make("qwen2", torch.bfloat16)
    with torch.no_grad():
        a, b = PackedForward(packed)(groups, mixed(groups)), PlainForward(plain)(groups, mixed(groups))
        exact = expected(plain, groups, mixed(groups))
    assert a.dtype == b.dtype == torch.float32
    assert (a - b).abs().mean() < 0.05
    assert (a - exact).abs().mean() < 0.05
    assert (b - exact).abs().mean() < 0.05


def test_softmax_is_not_taken_in_half_precision() -> None:
    logits = (torch.randn(50, 5000, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    targets = torch.arange(50)
    got = logprobs._target_logps(logits, targets, 0.9)
    want = torch.log_softmax(logits.double() / 0.9, dim=-1)[targets, targets]
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 1e-5


# ---------------------------------------------------------------- traps of DESIGN.md


class Wrong:
    """A forward as wrong as one of the traps makes it."""

    name = "wrong"

    def __init__(self, model: PreTrainedModel, trap: str) -> None:
        self._model, self._trap = model, trap

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        logps = []
        for one, temperature in zip(groups, temperatures, strict=True):
            ids = torch.tensor(np.concatenate([one.prompt_ids, one.completion_ids]))[None]
            positions = np.concatenate([np.arange(n) for n in (len(one.prompt_ids), *one.completion_lengths)])
            layout = [(len(one.prompt_ids), one.completion_lengths.tolist())]
            continued = torch.tensor(logprobs._positions(layout))[None]
            options: dict[str, Any] = {
                # Positions that restart, no mask: transformers takes the pieces for sequences of their own.
                "auto-packed": {"position_ids": torch.tensor(positions)[None]},
                # The packed attention, but positions that do not restart after the prompt.
                "default positions": {"packed_layout": layout, "attention_mask": torch.zeros(1, 1, 1, 1).bool()},
                # One causal sequence: completions see those before them.
                "one sequence": {"position_ids": continued, "attention_mask": torch.ones_like(ids)},
            }[self._trap]
            logits = self._model(input_ids=ids, use_cache=False, **options).logits[0]
            targets = torch.tensor(one.completion_ids)
            logps.append(logprobs._target_logps(logits[logprobs._predictors(layout)], targets, temperature))
        return torch.cat(logps)


# In bfloat16 an untrained model (0.02) hides the traps in its noise; float32 shows even those.
@pytest.mark.parametrize(("scale", "dtype"), [(0.02, torch.float32), (0.3, torch.float32), (0.3, torch.bfloat16)])
@pytest.mark.parametrize("trap", ["auto-packed", "default positions", "one sequence"])
def test_self_test_sees_the_traps(trap: str, scale: float, dtype: torch.dtype) -> None:
    model = make("qwen2", dtype, initializer_range=scale)
    model.set_attn_implementation(PACKED_ATTENTION)
    assert self_test_difference(model, Wrong(model, trap)) > 1.5 * logprobs._self_test_tolerance(dtype)
    assert self_test_difference(model, PackedForward(model)) < 0.5 * logprobs._self_test_tolerance(dtype)


def test_is_causal_is_not_trusted_with_unequal_lengths() -> None:
    """SDPA aligns its causal mask top-left: a completion would see its prompt's beginning only."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    got, _ = logprobs.packed_attention(module, query, key, value, None, packed_layout=[(4, [5])])
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True
    )
    assert torch.allclose(got, whole.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "sliding_window", "s_aux", "position_bias"])
def test_packed_attention_refuses_what_it_would_ignore(name: str) -> None:
    states = torch.zeros(1, 1, 2, 4)
    arguments: Any = {name: 4}
    with pytest.raises(NotImplementedError, match=name):
        logprobs.packed_attention(
            torch.nn.Module(), states, states, states, None, packed_layout=[(1, [1])], **arguments
        )


def test_the_cache_is_not_used() -> None:
    """A cache that one forward fills and another uses again is wrong by nats; here repeating changes nothing."""
    model = make("qwen2")
    assert model.config.use_cache
    for form in (PlainForward, PackedForward):
        forward = form(model)
        with torch.no_grad():
            first, second = forward(SHAPES["ragged"], [1.0]), forward(SHAPES["ragged"], [1.0])
        assert torch.equal(first, second)


# ---------------------------------------------------------------- choosing


class Shifted(PackedForward):
    """Off by one temperature step."""

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return super().__call__(groups, [t * 1.01 for t in temperatures])


class Undefined(PlainForward):
    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return super().__call__(groups, temperatures) * math.nan


class Refusing(PackedForward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        raise NotImplementedError("not this one")


@pytest.mark.parametrize("wrong", [Shifted, Refusing])
def test_a_wrong_packed_form_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: type[PackedForward]) -> None:
    monkeypatch.setattr(logprobs, "PackedForward", wrong)
    model = make("qwen2")
    before = model.config._attn_implementation
    assert choose_forward(model).name == "plain"
    assert model.config._attn_implementation == before


def test_without_a_right_form_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "PackedForward", Shifted)
    monkeypatch.setattr(logprobs, "PlainForward", Undefined)
    with pytest.raises(Refused, match=r"Qwen2ForCausalLM.*packed.*plain"):
        choose_forward(make("qwen2"))


def test_choosing_leaves_the_mode_alone() -> None:
    for training in (True, False):
        model = make("gpt2").train(training)
        assert choose_forward(model).name == "packed"
        assert model.training is training


def test_a_head_of_zeros_is_no_obstacle() -> None:
    """As some trainings begin: every log-prob is the same, so there is no spread to measure by."""
    model = make("qwen2")
    head: Any = model.get_output_embeddings()
    torch.nn.init.zeros_(head.weight)
    forward: LogprobForward = choose_forward(model)
    assert forward.name == "packed"
    got = forward([group(3, [4])], [1.0])
    assert torch.allclose(got, torch.full((4,), -math.log(VOCABULARY)))


def test_embedding_rows() -> None:
    assert embedding_rows(make("qwen2")) == VOCABULARY


# ---------------------------------------------------------------- the model afterwards


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
    assert (untouched(ids, attention_mask=hidden).logits - served(ids, attention_mask=hidden).logits).abs().max() < 1e-5


def test_what_is_sampled_is_scored_the_same() -> None:
    """The log-probs that greedy generation saw are those of the packed forward: sampler and learner agree."""
    model = make("qwen2")
    forward = choose_forward(model)
    prompt = torch.tensor([[5, 9, 33, 12, 7]])
    out: Any = model.generate(  # type: ignore[operator]
        prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    completion = out.sequences[0, 5:]
    seen = torch.stack([step[0].log_softmax(-1)[token] for step, token in zip(out.logits, completion, strict=True)])
    one = TokenGroup(prompt[0].numpy(), completion.numpy(), np.array([len(completion)]))
    with torch.no_grad():
        assert (forward([one], [1.0]) - seen).abs().max() < 1e-5


def test_a_saved_model_does_not_name_the_packed_attention(tmp_path: Path) -> None:
    """Else whoever loads what was published would need this code."""
    model = make("qwen2")
    assert choose_forward(model).name == "packed"
    model.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    groups = SHAPES["ragged"]
    assert again.config._attn_implementation == "sdpa"
    assert (expected(again, groups, [1.0]) - expected(model, groups, [1.0])).abs().max() < 1e-5
