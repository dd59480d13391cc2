"""Chooses a model's forward: the fastest one that agrees with a plain forward, row by row."""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.devices import multiplies_bfloat16
from shared.errors import UserError, brief
from shared.logprobs.attention import attention_of, set_attention
from shared.logprobs.forked import modules_with_state
from shared.logprobs.forward import LogprobForward, ServingForward
from shared.logprobs.head import target_logps
from shared.logprobs.packed import PackedForward, VarlenForward
from shared.logprobs.padded import PaddedForward, PlainForward, rope_depends_on_length
from shared.logprobs.varlen import has_kernel
from shared.logprobs.vision import Vision, vision_of
from shared.spelling import spell_setting

log = logging.getLogger(__name__)

# Settings of models whose layers attend to some of the tokens before.
_BOUNDS = ("sliding_window", "attention_chunk_size")
# Their size in the self-test: less than an image of its examples has tokens.
_SHORT_WINDOW = 3
# The size of chunks in which layers with a state are computed there, which its rows exceed: a size that kernels know.
_SHORT_CHUNK = 16
# Types of layers that packed sequences know, by transformers' names: without a state, and with one.
_STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
_WITH_STATE = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}


@overload
def choose_forward(model: PreTrainedModel) -> ServingForward: ...


@overload
def choose_forward(
    model: PreTrainedModel, within: Callable[[LogprobForward], LogprobForward], dtype: torch.dtype | None = None
) -> LogprobForward: ...


def choose_forward(
    model: PreTrainedModel,
    within: Callable[[Any], LogprobForward] = lambda forward: forward,
    dtype: torch.dtype | None = None,
) -> LogprobForward:
    """The fastest forward whose log-probs agree with row-by-row forwards of this model. UserError when none does.

    within: wraps a forward so that it runs where the model has its weights. dtype: the dtype of computation; default:
    that of the weights.
    """
    dtype = dtype or model.dtype
    attention = attention_of(model)
    errors: dict[str, str] = {}
    for candidate in _candidates(model, dtype):
        try:
            forward = within(candidate(model))
            difference = self_test_difference(model, forward, dtype)
        except Exception as error:  # an unsupported architecture may raise anything
            errors[candidate.name] = brief(error)
        else:
            if difference <= self_test_tolerance(dtype):
                return forward
            errors[candidate.name] = (
                f"differs from a plain forward by {difference:.2g} of the log-probs' standard deviation"
            )
        log.warning("the %s forward is refused: %s", candidate.name, errors[candidate.name])
        set_attention(model, attention)  # undo the change that a refused packed forward made
    if broken := next((name for name, each in model.named_parameters() if not each.isfinite().all()), None):
        raise UserError(f"model: {broken} has NaN or infinite values", "use another checkpoint")
    raise UserError(f"model: no forward computes correct log-probs for {type(model).__name__}: {errors}")


def slowed_by(form: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why a chosen form is not the fastest, and what would be faster, for people; empty for the fastest on its device.

    form: a `LogprobForward.name`.
    """
    if dtype == torch.bfloat16 and not multiplies_bfloat16(device):
        single = spell_setting("dtype", "float32")
        return f"this processor has no instructions for bfloat16: with {single} all is several times faster"
    if form.startswith(PackedForward.name):
        if form != PackedForward.name or device.type != "cuda" or has_kernel(dtype, device):
            return ""
        half = spell_setting("dtype", "bfloat16")
        return f"half precision ({half}) would compute the attention with a variable-length kernel, which is faster"
    slow = (
        "each prompt is computed once for each of its completions, as layers of this model do not take packed "
        "sequences (docs/models.md): log-probs of long prompts take up to four times as long as in the packed form"
    )
    return f"{slow}; its logits are computed whole, which takes more memory" if form == PlainForward.name else slow


def _candidates(
    model: PreTrainedModel, dtype: torch.dtype
) -> list[type[VarlenForward | PackedForward | PaddedForward | PlainForward]]:
    """The forwards to try, fastest first.

    Excludes forwards by the model's configuration where the self-test could not see a fault.
    """
    if not _has_known_head(model):
        return [PlainForward]
    packed = [PackedForward] if may_pack(model) else []
    varlen = [VarlenForward] if packed and has_kernel(dtype, model.device) else []
    return [*varlen, *packed, PaddedForward, PlainForward]


def may_pack(model: PreTrainedModel) -> bool:
    """True unless layers, or the head, do what the self-test cannot be trusted to notice. The model may be on the meta
    device: of a few architectures, such as StableLM, only the self-test refuses the packed forms."""
    config = model.config.get_text_config()
    layers = list(getattr(config, "layer_types", None) or [])
    return (
        _has_known_head(model)
        and _has_interface(model)
        and set(layers) <= _STATELESS | _WITH_STATE
        and sum(layer in _WITH_STATE for layer in layers) <= sum(1 for _ in modules_with_state(model))
        and not hasattr(config, "index_topk")  # chooses the tokens that each token attends to
        and not rope_depends_on_length(model)
        # Llama 4 counts places in the sequence from 8,192 on.
        and not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())
    )


def _has_interface(model: PreTrainedModel) -> bool:
    """True if the model's layers take what they compute from transformers' attention interface, or keep a state."""
    names = "_supports_sdpa", "_supports_attention_backend"
    return any(getattr(model, name, False) for name in names) or any(modules_with_state(model))


def _has_known_head(model: PreTrainedModel) -> bool:
    """True if the logits are the head's output unchanged, or with the one softcap that `LMHead` implements."""
    names = model.config.get_text_config().to_dict()
    caps = {name for name, value in names.items() if value and ("softcap" in name or "soft_cap" in name)}
    return not caps - {"final_logit_softcapping", "attn_logit_softcapping"}


def self_test_difference(
    model: PreTrainedModel,
    forward: Callable[[Sequence[TokenGroup], Sequence[float]], Tensor],
    dtype: torch.dtype | None = None,
) -> float:
    """The difference between `forward` and unpadded rows computed one by one, on random groups.

    A model that takes images is also given a group with two.
    It is relative to the standard deviation of the log-probs: a small random model's log-probs hardly vary, so even a
    wrong forward differs little. With a large vocabulary that deviation is of the order of the log-probs' rounding
    errors, which are therefore subtracted. It is the maximum over tokens, or in half precision the mean: half precision
    depends on the shapes of the matrix products, so single tokens differ even between correct forwards.
    """
    vision = vision_of(model)
    # Some models embed more ids than they predict.
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    vocabulary = min(rows, model.config.get_text_config().vocab_size)
    groups = _test_groups(vocabulary, vision, any(modules_with_state(model)))
    temperatures = [(1.0, 0.7, 1.3)[number % 3] for number in range(len(groups))]
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _shortened(model):
            got = forward(groups, temperatures)
            rows = torch.cat([_row_by_row(model, vision, *pair) for pair in zip(groups, temperatures, strict=True)])
    finally:
        model.train(training)
    rounding = 2 * torch.finfo(rows.dtype).eps * rows.abs()
    difference = ((got.to(rows.device) - rows).abs() - rounding).clamp(min=0) / rows.std().clamp(min=0.01)
    return float(difference.max() if (dtype or model.dtype) in (torch.float32, torch.float64) else difference.mean())


@contextmanager
def _shortened(model: PreTrainedModel) -> Generator[None]:
    """Makes windows and chunks so short that the self-test's rows are longer, as those of real prompts may be."""
    config = model.config.get_text_config()
    limits: list[tuple[Any, str, int]] = [(config, name, _SHORT_WINDOW) for name in _BOUNDS]
    limits += [(module, "chunk_size", _SHORT_CHUNK) for module in modules_with_state(model)]
    sizes = [(owner, name, size, most) for owner, name, most in limits if (size := getattr(owner, name, None))]
    try:
        for owner, name, size, most in sizes:
            setattr(owner, name, min(size, most))
        yield
    finally:
        for owner, name, size, _ in sizes:
            setattr(owner, name, size)


def self_test_tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def _test_groups(vocabulary: int, vision: Vision | None, states: bool) -> list[TokenGroup]:
    generator = np.random.default_rng(0)

    def group(prompt: int, lengths: list[int]) -> TokenGroup:
        ids = generator.integers(0, vocabulary, size=prompt + sum(lengths))
        if vision is not None:
            ids[np.isin(ids, vision.placeholders)] = 0
        return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths))

    groups = [group(7, [5, 1, 9]), group(3, [4, 2])]
    if states:  # longer than the chunks in which linear attention is computed
        groups += [group(70, [66, 2]), group(1, [3])]
    if vision is not None:
        text, images = group(3, [3, 6]), vision.example(generator)
        prompt = vision.example_prompt(images, text.prompt_ids)
        groups.insert(1, TokenGroup(prompt, text.completion_ids, text.completion_lengths, images))
    return groups


def _row_by_row(model: PreTrainedModel, vision: Vision | None, group: TokenGroup, temperature: float) -> Tensor:
    prompt, logps = len(group.prompt_ids), []
    for completion in group.completions():
        row = torch.tensor(np.concatenate([group.prompt_ids, completion]), device=model.device)[None]
        extra = vision.inputs([group.images], row) if vision else {}
        logits = model(input_ids=row, use_cache=False, **extra).logits[0]
        logps.append(target_logps(logits[prompt - 1 : -1], row[0, prompt:], temperature))
    return torch.cat(logps)
