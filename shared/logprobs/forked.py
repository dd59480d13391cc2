"""Layers with a state (linear attention, convolutions, Mamba) in a packed sequence: each completion continues from a
copy of its prompt's state.

The model's modules compute everything: they are called with the prompts, then with the completions and transformers'
own interface of a cache, which holds the prompts' states. Gradients of all copies reach the prompt. A module whose scan
does not begin with a state, such as transformers' Mamba 1, is called with whole rows instead: the prompt for each
completion.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from shared.logprobs.attention import PackingContext, current_packing
from shared.logprobs.layout import PackedLayout, Span

# Names of the cache in arguments and outputs of models and their modules: the first from transformers 5.24 on, the last
# in layers that keep a state, and models of only such layers.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Tokens of padding that cost about as much as another call.
_CALL_TOKENS = {"cpu": 32}
_GPU_CALL_TOKENS = 2048


class States:
    """What a module with a state asks of transformers' cache, without writing in place: gradients flow through it."""

    def __init__(self) -> None:
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}

    def copies(self, rows: Tensor) -> "States":
        """The states of some rows, int64 (R,), which may occur several times."""
        copied = States()
        copied._conv = {index: state.index_select(0, rows) for index, state in self._conv.items()}
        copied._recurrent = {index: state.index_select(0, rows) for index, state in self._recurrent.items()}
        return copied

    @staticmethod
    def joined(parts: "Sequence[States]") -> "States":
        """The rows of several, in order."""
        whole = States()
        whole._conv = {index: torch.cat([part._conv[index] for part in parts]) for index in parts[0]._conv}
        whole._recurrent = {
            index: torch.cat([part._recurrent[index] for part in parts]) for index in parts[0]._recurrent
        }
        return whole

    def detach_(self) -> list[Tensor]:
        """Cuts the states from their history, and returns them: leaves with gradients."""
        for states in (self._conv, self._recurrent):
            for index, state in states.items():
                states[index] = state.detach().requires_grad_()
        return [*self._conv.values(), *self._recurrent.values()]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """(R, channels, T) new inputs of a convolution -> the same behind those of the state. Keeps the last ones."""
        size = conv_kernel_size or conv_states.shape[-1]
        before = self._conv.get(state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self._conv[state_idx] = F.pad(whole, (max(size - whole.shape[-1], 0), 0))[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def modules_with_state(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that has a causal convolution of its own and takes a cache for its state."""
    for module in model.modules():
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves and _cache_name(module) is not None:
            yield module


def fork_states(model: nn.Module) -> set[nn.Module]:
    """Has the model's modules with a state, which it returns, fork it in packed forwards. Other forwards do not
    change."""
    modules = set(modules_with_state(model))
    for module in modules:
        cache = _cache_name(module)
        if getattr(module.forward, "func", None) is not _forward and cache is not None:
            module.forward = partial(_forward, module, module.forward, cache)
    return modules


def _cache_name(module: nn.Module) -> str | None:
    forward: Any = module.forward
    if getattr(forward, "func", None) is _forward:
        return forward.args[2]
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


# Whether classes of modules, on kinds of devices, continue from their state.
_continues: dict[tuple[type[nn.Module], str], bool] = {}


def _forward(
    module: nn.Module, plain_forward: Any, cache_name: str, /, hidden_states: Tensor, *args: Any, **options: Any
) -> Tensor:
    """What the module's forward does; in a packed forward the output for (1, N, h) hidden states."""
    packing = current_packing()
    if packing is None:
        return plain_forward(hidden_states, *args, **options)
    if args:
        raise NotImplementedError(f"{type(module).__name__} gets a mask or a cache by its place")
    # Padding is at the right, where no token sees it.
    run = partial(plain_forward, **{**options, "attention_mask": None})
    kind = type(module), hidden_states.device.type
    packing.forked.add(module)
    with PackingContext(None):
        if kind not in _continues:
            _continues[kind] = _continues_from_state(run, cache_name, hidden_states)
        if _continues[kind]:
            return _forked(run, cache_name, hidden_states[0], packing.layout)[None]
        return _row_by_row(run, hidden_states[0], packing.layout)[None]


def _continues_from_state(run: Any, cache_name: str, like: Tensor) -> bool:
    """Whether outputs for further tokens depend on every state that the module keeps.

    Where weights are small they depend on it so little that no comparison of log-probs would notice.
    """
    if not hasattr(Cache, "get_conv_state"):  # before transformers 5.21: modules ask a cache for other things
        return False
    channels = torch.linspace(-1, 1, like.shape[2], dtype=like.dtype, device=like.device)
    tokens = channels * torch.arange(1, 5, dtype=like.dtype, device=like.device)[None, :, None]
    identity = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)  # not a checkpoint's
    with torch.inference_mode(False), torch.enable_grad(), identity:
        states = States()
        run(tokens.clone(), **{cache_name: states})
        leaves = states.detach_()
        output = run(tokens.clone(), **{cache_name: states})
        return bool(leaves) and None not in torch.autograd.grad(output.sum(), leaves, allow_unused=True)


def _forked(run: Any, cache_name: str, tokens: Tensor, layout: PackedLayout) -> Tensor:
    """(N, h) -> (N, h). run: (R, T, h) rows and a cache -> (R, T, h)."""
    prompts = [span for span in layout.spans if span.prompt is None]
    completions = [span for span in layout.spans if span.prompt is not None]
    parts: dict[Span, Tensor] = {}
    states: list[States] = []
    order: dict[Span, int] = {}
    # Prompts of one length together: the state behind padding would be another one.
    for _, group in groupby(sorted(prompts, key=lambda span: span.length), key=lambda span: span.length):
        spans = list(group)
        states.append(States())
        outputs = run(torch.stack([tokens[span.start : span.end] for span in spans]), **{cache_name: states[-1]})
        order |= {span: len(order) + number for number, span in enumerate(spans)}
        parts |= zip(spans, outputs, strict=True)
    begun = States.joined(states)
    for spans in _batches(completions, lambda span: span.length, tokens.device):
        # At least two tokens: for a single one, modules may update the state in place.
        width = max(2, *(span.length for span in spans))
        rows = torch.stack([F.pad(tokens[span.start : span.end], (0, 0, 0, width - span.length)) for span in spans])
        owners = torch.tensor([order[span.prompt] for span in spans if span.prompt], device=tokens.device)
        outputs = run(rows, **{cache_name: begun.copies(owners)})
        parts |= {span: output[: span.length] for span, output in zip(spans, outputs, strict=True)}
    return torch.cat([parts[span] for span in layout.spans])


def _row_by_row(run: Any, tokens: Tensor, layout: PackedLayout) -> Tensor:
    """(N, h) -> (N, h). run: (R, T, h) rows -> (R, T, h)."""
    prompts = {span: span.prompt for span in layout.spans if span.prompt is not None}
    parts: dict[Span, Tensor] = {}
    for spans in _batches(prompts, lambda span: prompts[span].length + span.length, tokens.device):
        rows = [torch.cat([tokens[each.start : each.end] for each in (prompts[span], span)]) for span in spans]
        for span, output in zip(spans, run(nn.utils.rnn.pad_sequence(rows, batch_first=True)), strict=True):
            start = prompts[span].length
            parts.setdefault(prompts[span], output[:start])
            parts[span] = output[start : start + span.length]
    return torch.cat([parts[span] for span in layout.spans])


def _batches(spans: Iterable[Span], length: Callable[[Span], int], device: torch.device) -> Iterator[list[Span]]:
    """Spans of similar lengths: another joins while all their padding costs less than a call."""
    limit = _CALL_TOKENS.get(device.type, _GPU_CALL_TOKENS)
    batch: list[Span] = []
    padding = 0
    for span in sorted(spans, key=length, reverse=True):
        padding += length(batch[0]) - length(span) if batch else 0
        if padding > limit:
            yield batch
            batch, padding = [], 0
        batch.append(span)
    yield batch
