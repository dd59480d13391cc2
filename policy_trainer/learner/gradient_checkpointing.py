"""Gradient checkpointing: layers keep their inputs alone, and are computed again on the way back (Chen et al., Training
Deep Nets with Sublinear Memory Cost, arXiv 1604.06174)."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import UserError


def checkpoint_layers(model: nn.Module) -> None:
    """From now on, whatever the mode of the model; where no gradients are wanted nothing changes.

    transformers' own switch works in training mode only, which would bring dropout with it.
    Raises UserError for a model whose layers transformers does not mark as such.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that can be computed again; "
            "train without, and lower micro_batch_tokens instead"
        )
    for layer in layers:
        # Without dropout there are no random numbers to draw again.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
