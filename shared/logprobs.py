"""Log-probs of completion tokens: the only shift-by-one and the only LM-head code, used by the server and the trainer.

Because both sides run this same code, the KL between a policy that has not moved and its reference is 0.

There are two ways to compute them. `PackedForward` lays whole groups in one sequence `[prompt | c_1 | … | c_G |
prompt …]`, so that each prompt is computed once and nothing is padded, and runs the LM head on the completion targets
only, in chunks. `PlainForward` is the model's own forward on right-padded rows, right for every architecture.
`choose_forward` looks at the model, tries, and compares with the plainest forward there is before it trusts either.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from shared.batch import TokenGroup
from shared.refusal import Refused

PACKED_ATTENTION = "tandem_packed"
# Logits held at once: 2^24 float32 are 64 MiB whatever the vocabulary.
HEAD_CHUNK_LOGITS = 2**24
# Tokens of a padded micro-batch of the plain forward, at most, unless one row alone has more.
PLAIN_ROW_TOKENS = 4096


class LogprobForward(Protocol):
    """Groups and the temperature of each -> (sum of C,) float32 log-probs of their completion tokens, in order.

    log-probs are of logits / temperature. Differentiable where gradients are enabled.
    """

    name: str

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor: ...


def choose_forward(model: PreTrainedModel) -> LogprobForward:
    """The fastest forward that agrees with row-by-row forwards of this model; Refused when none does."""
    attention: Any = model.config._attn_implementation
    errors: dict[str, str] = {}
    for candidate in (PackedForward, PlainForward) if _can_pack(model) else (PlainForward,):
        try:
            forward = candidate(model)
            difference = self_test_difference(model, forward)
        except Exception as error:  # an architecture may refuse the packed form in any way it likes
            errors[candidate.name] = repr(error)
        else:
            if difference <= _self_test_tolerance(model.dtype):
                return forward
            errors[candidate.name] = f"differs from a plain forward by {difference:.2g} of the log-probs' spread"
        model.set_attn_implementation(attention)  # a refused packed form leaves no trace
    raise Refused(f"model: no way of computing log-probs is right for {type(model).__name__}: {errors}")


class PackedForward:
    """Whole groups in one packed sequence; needs full attention through transformers' attention interface."""

    name = "packed"

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(PACKED_ATTENTION)
        self._model = model

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        device = self._model.device
        layout = [(len(group.prompt_ids), group.completion_lengths.tolist()) for group in groups]
        ids = np.concatenate([part for group in groups for part in (group.prompt_ids, group.completion_ids)])
        hidden: Tensor = self._model.base_model(
            input_ids=torch.tensor(ids, device=device)[None],
            position_ids=torch.tensor(_positions(layout), device=device)[None],
            # Any 4D mask keeps transformers from building an N x N one; the packed attention needs none.
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=False,
            packed_layout=layout,
        ).last_hidden_state[0]
        predictors = torch.tensor(_predictors(layout), device=device)
        targets = torch.tensor(np.concatenate([group.completion_ids for group in groups]), device=device)
        counts = [len(group.completion_ids) for group in groups]
        divisors = torch.tensor(np.repeat(temperatures, counts), dtype=torch.float32, device=device)
        head = self._model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return _head_logps(head, hidden[predictors], targets, divisors)


class PlainForward:
    """The model's own forward on length-sorted, right-padded rows: causal models never look at what is to the right."""

    name = "plain"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        rows = [
            (len(group.prompt_ids), np.concatenate([group.prompt_ids, completion]), temperature)
            for group, temperature in zip(groups, temperatures, strict=True)
            for completion in group.completions()
        ]
        logps: list[Tensor | None] = [None] * len(rows)
        limit = 1 if _rope_depends_on_length(self._model) else PLAIN_ROW_TOKENS
        for indexes in _micro_batches([len(ids) for _, ids, _ in rows], limit):
            for index, row in zip(indexes, self._rows([rows[i] for i in indexes]), strict=True):
                logps[index] = row
        return torch.cat([row for row in logps if row is not None])

    def _rows(self, rows: list[tuple[int, Any, float]]) -> Iterator[Tensor]:
        device = self._model.device
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row, device=device) for _, row, _ in rows], batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), device=device) for _, row, _ in rows], batch_first=True)
        logits = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        for row_logits, row_ids, (prompt, row, temperature) in zip(logits, ids, rows, strict=True):
            yield _target_logps(row_logits[prompt - 1 : len(row) - 1], row_ids[prompt : len(row)], temperature)


def self_test_difference(model: PreTrainedModel, forward: LogprobForward) -> float:
    """How far `forward` is from unpadded rows one by one, on random groups, as a fraction of the log-probs' spread.

    A fraction, since a small random model's log-probs hardly spread, and a wrong forward is then wrong by little. It is
    the maximum, or in half precision the mean over tokens: half precision depends on the shapes of the matrix products,
    so that single tokens differ between right forwards.
    """
    generator = np.random.default_rng(0)
    vocabulary = embedding_rows(model)

    def group(prompt: int, lengths: list[int]) -> TokenGroup:
        ids = generator.integers(0, vocabulary, size=prompt + sum(lengths))
        return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths))

    groups, temperatures = [group(7, [5, 1, 9]), group(3, [4, 2])], [1.0, 0.7]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            got = forward(groups, temperatures)
            expected = []
            for test_group, temperature in zip(groups, temperatures, strict=True):
                for completion in test_group.completions():
                    prompt = len(test_group.prompt_ids)
                    row = torch.tensor(np.concatenate([test_group.prompt_ids, completion]), device=model.device)
                    logits = model(input_ids=row[None], use_cache=False).logits[0]
                    expected.append(_target_logps(logits[prompt - 1 : -1], row[prompt:], temperature))
    finally:
        model.train(training)
    rows = torch.cat(expected)
    difference = (got - rows).abs() / rows.std().clamp(min=0.01)
    return float(difference.max() if model.dtype in (torch.float32, torch.float64) else difference.mean())


def embedding_rows(model: PreTrainedModel) -> int:
    """The number of token ids that the model knows: rows of its input embedding."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[return-value]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: list[tuple[int, list[int]]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) queries -> (1, N, H, D), segment by segment.

    Each prompt attends to itself, each completion to its prompt and itself. Without a layout it is plain SDPA, so that
    the model still generates.
    """
    if packed_layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    unknown = [name for name in ("softcap", "sliding_window", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"packed attention has no {', '.join(unknown)}")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs, start = [], 0
    for prompt, completions in packed_layout:
        own = slice(start, start + prompt)
        prompt_key, prompt_value = key[:, :, own], value[:, :, own]
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, own], prompt_key, prompt_value, dropout_p=dropout, is_causal=True, scale=scaling
            )
        )
        start += prompt
        for length in completions:
            own = slice(start, start + length)
            # is_causal would align top-left; completion token t may see the prompt and its own tokens up to t.
            mask = torch.ones(length, prompt + length, dtype=torch.bool, device=query.device).tril(prompt)
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, own],
                    torch.cat([prompt_key, key[:, :, own]], dim=2),
                    torch.cat([prompt_value, value[:, :, own]], dim=2),
                    attn_mask=mask,
                    dropout_p=dropout,
                    scale=scaling,
                )
            )
            start += length
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def _can_pack(model: PreTrainedModel) -> bool:
    """Full attention in every layer, and logits that are the head's own.

    Looked up, since a window longer than the self-test's rows, or a cap above its logits, would escape the self-test.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    bounds = [
        value
        for name, value in config.to_dict().items()
        if name in ("sliding_window", "attention_chunk_size") or "softcap" in name or "soft_cap" in name
    ]
    attends = getattr(model, "_supports_sdpa", False) and set(layers) == {"full_attention"}
    whole = attends and not any(bounds) and not _rope_depends_on_length(model)
    return whole and model.get_output_embeddings() is not None


def _rope_depends_on_length(model: PreTrainedModel) -> bool:
    """Whether the longest row of a forward sets the rotary frequencies of all, so that rows must go one by one."""
    rope: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each layer type
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _self_test_tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.1


def _positions(layout: list[tuple[int, list[int]]]) -> Any:
    """Position ids of the packed sequence: each completion continues where its prompt ended."""
    return np.concatenate(
        [np.arange(start, start + n) for prompt, lengths in layout for start, n in _spans(prompt, lengths)]
    )


def _spans(prompt: int, lengths: list[int]) -> list[tuple[int, int]]:
    return [(0, prompt), *((prompt, length) for length in lengths)]


def _predictors(layout: list[tuple[int, list[int]]]) -> Any:
    """Index in the packed sequence of the position that predicts each completion token: the shift by one.

    The first token of every completion is predicted by the last token of its prompt.
    """
    parts, start = [], 0
    for prompt, lengths in layout:
        last = start + prompt - 1
        ends = list(accumulate(lengths, initial=start + prompt))
        parts += [np.concatenate([[last], np.arange(begin, end - 1)]) for begin, end in pairwise(ends)]
        start = ends[-1]
    return np.concatenate(parts)


def _head_logps(head: nn.Module, hidden: Tensor, targets: Tensor, divisors: Tensor) -> Tensor:
    """LM head, temperature and log-softmax in chunks: (C, h) -> (C,) float32. The backward recomputes each chunk."""
    rows = max(1, HEAD_CHUNK_LOGITS // int(head.weight.shape[0]))  # type: ignore[union-attr]
    chunks = []
    for part in zip(hidden.split(rows), targets.split(rows), divisors.split(rows), strict=True):
        chunks.append(checkpoint(_chunk_logps, head, *part, use_reentrant=False))
    return torch.cat(chunks)


def _chunk_logps(head: nn.Module, hidden: Tensor, targets: Tensor, divisors: Tensor) -> Tensor:
    return _target_logps(head(hidden), targets, divisors[:, None])


def _target_logps(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> Tensor:
    """(C, V) logits that predict (C,) targets -> (C,) log-probs. Upcast before the softmax: in bf16 it errs by 0.05."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)


def _micro_batches(lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Row indexes sorted by length, cut so that a padded micro-batch holds at most `limit` tokens or one row."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Sorted upwards: the newest row is the longest and sets the padding of all.
        if batch and (len(batch) + 1) * lengths[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
