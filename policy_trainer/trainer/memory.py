"""What a process needs in memory, in bytes, from the shapes of a model. docs/memory.md says what each term is.

Exact for what has the size of parameters. Activations are those of layers like Llama's: attention, and a gated MLP.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.adapters import vision_tower
from policy_trainer.learner.gradient_checkpointing import layers_of
from policy_trainer.learner.optimizer import trained
from policy_trainer.rollout.sampling.kv_cache import GROWTH
from policy_trainer.rollout.sampling.prepacked import PREPACKED_BYTES
from shared.logprobs import language_model, vision_of
from shared.logprobs.head import KEPT_LOGITS
from shared.logprobs.tiles import tile_logits

Parts = dict[str, int]
"""Bytes by what holds them."""
# Parts that grow with the number of tokens. They assume that all completions have the maximum length.
AT_MOST = frozenset({"activations", "cache", "freed memory"})

FLOAT32 = 4
# Main memory of a process before it loads a model, measured with PyTorch's build for the CPU.
PROGRAM: Parts = {"Python and PyTorch": 400 * 10**6}
# Bytes of a weight in 4 bits: one byte more for each 64 of them, and four for each 256 of those bytes.
_IN_4BIT = 1 / 2 + 1 / 64 + FLOAT32 / (64 * 256)
# float32 tensors of a tile that are alive at a time: its logits, their log-softmax and its exponential.
_TILES = 3


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Equal layers. hidden, mlp, queries, keys, head: channels of a token in the residual stream, in the MLP, in all
    query heads, in all key heads, in one."""

    layers: int
    hidden: int
    mlp: int
    queries: int
    keys: int
    head: int


@dataclass(frozen=True, kw_only=True)
class Tower(Layers):
    """The layers that see pictures. patches: for each token of a picture. trains: whether its weights do."""

    patches: float
    trains: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None for a model that takes no pictures."""
        vision = vision_of(model)
        if vision is None:
            return None
        config: Any = model.config.vision_config
        hidden = getattr(config, "embed_dim", None) or config.hidden_size  # hidden_size of Qwen2-VL's is the text's
        return cls(
            layers=getattr(config, "depth", None) or config.num_hidden_layers,
            hidden=hidden,
            mlp=getattr(config, "intermediate_size", None) or int(config.mlp_ratio * hidden),
            queries=hidden,
            keys=hidden,
            head=hidden // (getattr(config, "num_heads", None) or config.num_attention_heads),
            patches=vision.patches_per_token(),
            trains=any(name.startswith(tuple(vision_tower(model))) for name in trained(model)),
        )


@dataclass(frozen=True, kw_only=True)
class Shape(Layers):
    """A model's sizes. parameters: in all, a tied weight once; trained: of those that train; largest: of the largest
    matrix that does; tied: whether that is embedding and head in one; keeps_logits: whether the head keeps logits for
    its backward; layer: of the largest layer, 0 where transformers does not mark layers; trained_layer: of those that
    train in one. quantised: of those in 4 bits; dequantised: of the largest matrix of them. tower: None for a text
    model. queries, keys: on average, where layers differ.
    """

    parameters: int
    trained: int
    largest: int
    tied: bool
    keeps_logits: bool
    vocabulary: int
    layer: int
    trained_layer: int
    quantised: int = 0
    dequantised: int = 0
    tower: Tower | None

    def weights(self, width: int) -> Parts:
        """width: bytes of a weight. With some in 4 bits also the one matrix that a layer computes with."""
        if not self.quantised:
            return {"weights": width * self.parameters}
        weights = width * (self.parameters - self.quantised) + int(_IN_4BIT * self.quantised)
        return {"weights": weights, "a dequantised matrix": width * self.dequantised}

    @property
    def outside(self) -> int:
        """Parameters of the embedding, the last norm and the head."""
        return self.parameters - self.layers * self.layer

    @property
    def trained_outside(self) -> int:
        return self.trained - self.layers * self.trained_layer

    @classmethod
    def of(cls, model: PreTrainedModel, *, in_4bit: bool = False, entropy_bonus: bool = False) -> Self:
        """model: may be on the meta device. in_4bit: whether its linear layers will be quantised. entropy_bonus:
        whether the loss has one."""
        config: Any = model.config.get_text_config()
        quantised = _linear_sizes(model) if in_4bit else []
        largest = max(trained(model).values(), key=Tensor.numel)
        head = model.get_output_embeddings()
        layers = layers_of(language_model(model))
        hidden = config.hidden_size
        attentions = [_attention(each, hidden) for each in _of_layers(config)]
        queries, keys = (-(-sum(sizes) // len(sizes)) for sizes in list(zip(*attentions, strict=True))[:2])
        experts = getattr(config, "num_experts_per_tok", None)
        mlp = getattr(config, "intermediate_size", None) or 4 * hidden
        mlp = max(mlp) if isinstance(mlp, Sequence) else mlp
        return cls(
            parameters=_count(model.parameters()),
            trained=_count(trained(model).values()),
            largest=largest.numel(),
            tied=head is not None and largest is head.weight is model.get_input_embeddings().weight,
            keeps_logits=head is None or head.weight.requires_grad or entropy_bonus,
            layers=config.num_hidden_layers,
            hidden=hidden,
            mlp=experts * (getattr(config, "moe_intermediate_size", None) or mlp) if experts else mlp,
            queries=queries,
            keys=keys,
            head=max(head for _, _, head in attentions),
            vocabulary=config.vocab_size,
            layer=max((_count(layer.parameters()) for layer in layers), default=0),
            trained_layer=max((_count(trained(layer).values()) for layer in layers), default=0),
            quantised=sum(quantised),
            dequantised=max(quantised, default=0),
            tower=Tower.of(model),
        )


def _of_layers(config: Any) -> Sequence[Any]:
    """The configuration of each layer if they differ, as in Gemma 4; else the common one."""
    return list(getattr(config, "per_layer_config", None) or [config])


def _attention(config: Any, hidden: int) -> tuple[int, int, int]:
    """Channels of all query heads, of all key heads, and of one head, in a layer of this configuration."""
    heads = getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or hidden // heads
    return heads * head, (getattr(config, "num_key_value_heads", None) or heads) * head, head


def _linear_sizes(model: PreTrainedModel) -> list[int]:
    """Parameters of each matrix that transformers quantises: of linear layers, but for the LM head and adapters."""
    return [
        module.weight.numel()
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and module is not model.get_output_embeddings()
        and ".lora_" not in name
    ]


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a forward computes. tokens: that pass the layers, with padding; completions: those with logits. device: its
    type."""

    tokens: int
    completions: int
    device: str


def training(shape: Shape, width: int, optimizer: OptimizerConfig, work: Work, *, recompute: bool) -> Parts:
    """The trainer, on its device. width: bytes of a weight. work: of a micro-batch. recompute: gradient
    checkpointing."""
    return {
        **shape.weights(width),
        **_optimizer(shape, width, optimizer),
        "activations": activations(shape, width, work, recompute=recompute),
    }


def _optimizer(shape: Shape, width: int, optimizer: OptimizerConfig) -> Parts:
    if optimizer.offload == "cpu":  # one gradient with its float32 sum, and the next one
        return {"gradients that leave": (2 * width + FLOAT32) * shape.largest}
    has_masters = width < FLOAT32 and optimizer.has_masters
    stepped = FLOAT32 if has_masters else width
    masters = {"masters": FLOAT32 * shape.trained} if has_masters else {}
    return {**masters, "gradients": stepped * shape.trained, "AdamW": 2 * stepped * shape.trained}


def divided(shape: Shape, width: int, optimizer: OptimizerConfig, *, ranks: int, micro_batches: int) -> Parts:
    """One of several ranks, on its device, without activations. width: bytes of a weight in a forward. micro_batches:
    of a rank in a step."""
    stepped = FLOAT32 if optimizer.has_masters else width
    share, frozen = (-(-size // ranks) for size in (shape.trained, shape.parameters - shape.trained))
    # The layer at work and the next one; a layer's gradient, and its float32 copy on the way to the other ranks.
    weights = width * (shape.outside + 2 * shape.layer)
    gradients = (width + FLOAT32) * (shape.trained_outside + shape.trained_layer)
    several = {"gradients of several micro-batches": FLOAT32 * shape.trained} if micro_batches > 1 else {}
    return {
        "weights": stepped * share + width * frozen,
        "gradients": stepped * share,
        "AdamW": 2 * stepped * share,
        "whole layers": weights + gradients,
        **several,
    }


def traffic(shape: Shape, width: int, *, ranks: int, micro_batches: int) -> int:
    """Bytes that one of several ranks sends in a step, and as many that it receives: each layer's weights for each
    forward and again for its backward, the others for both; and all gradients once, in float32."""
    gathered = width * (2 * shape.layers * shape.layer + shape.outside)
    return (micro_batches * gathered + FLOAT32 * shape.trained) * (ranks - 1) // ranks


def gathered(shape: Shape, width: int, *, ranks: int, forwards: int) -> int:
    """Bytes that one of several ranks sends for forwards without a backward, and as many that it receives."""
    return forwards * width * shape.parameters * (ranks - 1) // ranks


def offloaded(shape: Shape) -> Parts:
    """Main memory of an offloading trainer."""
    return {
        "float32 copies": FLOAT32 * shape.trained,
        "gradients": FLOAT32 * shape.trained,
        "AdamW": 2 * FLOAT32 * shape.trained,
    }


def activations(shape: Shape, width: int, work: Work, *, recompute: bool) -> int:
    """What a forward keeps for its backward, and the largest temporary tensors. Prompts of a model that takes pictures
    are counted as pictures."""
    if shape.keeps_logits:
        logits = _logits(shape, work, kept=KEPT_LOGITS)
    else:  # gradients of the hidden states instead
        logits = _logits(shape, work, kept=0) + 2 * FLOAT32 * work.completions * shape.hidden
    # Autograd has the gradient of a tied matrix from the head until the embedding adds its own, out of place.
    gradient = width * shape.largest
    held, added = (gradient, 3 * gradient) if shape.tied else (0, gradient)
    text = max(added, held + _activations(shape, width, work.tokens, logits, recompute=recompute))
    if shape.tower is None:
        return text
    patches = _patches(shape.tower, work.tokens - work.completions)
    if shape.tower.trains:
        return text + _activations(shape.tower, width, patches, 0, recompute=recompute)
    return max(text, patches * _passing(shape.tower, width))


def _activations(shape: Layers, width: int, tokens: int, logits: int, *, recompute: bool) -> int:
    """logits: bytes of what comes after the layers."""
    # RMSNorm computes in float32, and keeps its input so; then the normalised and the scaled output.
    norm = (FLOAT32 + 2 * width) * shape.hidden
    # Queries as projected, as laid out in spans, and the output; keys and values twice. Gate, its SiLU, up, product.
    layer = 2 * norm + width * (3 * shape.queries + 4 * shape.keys + 4 * shape.mlp)
    kept = width * shape.hidden if recompute else layer
    # In the backward: the gradients of the MLP, and the one layer that is computed again.
    passing = 2 * width * shape.mlp + layer * recompute
    return tokens * (shape.layers * kept + norm + _rotary(shape, width)) + max(tokens * passing, logits)


def _patches(tower: Tower, tokens: int) -> int:
    return int(tower.patches * tokens)


def _rotary(shape: Layers, width: int) -> int:
    """Cosines and sines of a position, with what is made on the way: as measured."""
    return 6 * width * shape.head


def _logits(shape: Shape, work: Work, *, kept: int) -> int:
    """Those that the LM head keeps, and the tile at work."""
    logits = work.completions * shape.vocabulary
    return FLOAT32 * (min(logits, kept) + _TILES * min(logits, tile_logits(work.device)))


def scoring(shape: Shape, width: int, work: Work) -> Parts:
    """The reference server: forwards that keep nothing. work: of a forward."""
    pictures = 0
    if shape.tower is not None:
        pictures = _patches(shape.tower, work.tokens - work.completions) * _passing(shape.tower, width)
    return {
        "weights": width * shape.parameters,
        "activations": max(work.tokens * _passing(shape, width), pictures, _logits(shape, work, kept=0)),
    }


def _passing(shape: Layers, width: int) -> int:
    """Of a token, in a forward that keeps nothing."""
    return width * (4 * shape.hidden + 3 * max(shape.mlp, shape.queries)) + _rotary(shape, width)


def cache_of_token(shape: Shape, width: int) -> int:
    """Keys and values of one token."""
    return 2 * shape.layers * shape.keys * width


def sampling(shape: Shape, width: int, *, tokens: int, rows: int) -> Parts:
    """A worker with sampler hf. tokens: of a round, prompts once. rows: its completions."""
    return {
        **shape.weights(width),
        "cache": int(GROWTH * tokens * cache_of_token(shape, width)),
        "logits": _TILES * FLOAT32 * rows * shape.vocabulary,
    }


def prepacked(shape: Shape, width: int) -> Parts:
    """A CPU that samples with sampler hf."""
    return {"prepacked weights": min(width * shape.parameters, PREPACKED_BYTES)}


def publication(shape: Shape, width: int) -> Parts:
    """Main memory for the version that is being written or uploaded: with LoRA only the adapters."""
    return {"published version": width * shape.trained}
