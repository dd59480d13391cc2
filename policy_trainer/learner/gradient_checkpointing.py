"""Gradient checkpointing: layers keep only their inputs and are recomputed in the backward (Chen et al., Training Deep
Nets with Sublinear Memory Cost, arXiv 1604.06174)."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import UserError
from shared.logprobs.attention import packing_of_checkpoint


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that transformers marks as such; none for some architectures."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: nn.Module) -> None:
    """Turns it on for all layers, in training and evaluation mode; without gradients nothing changes.

    transformers' own switch works in training mode only, where dropout is active.
    Raises UserError for a model whose layers transformers does not mark as such.
    """
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that support it",
            "train without, and lower micro_batch_tokens instead",
        )
    for layer in layers:
        # Without dropout the recomputation draws no random numbers.
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=packing_of_checkpoint,
        )
