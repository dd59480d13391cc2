"""Which device each part of the model is on."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ref_server.config import ServeConfig
from ref_server.scoring.device_maps import balanced_map, describe_devices, device_map_of, device_maps
from shared.errors import UserError
from shared.models import load_mapped_model


@pytest.fixture(scope="module")
def outline() -> PreTrainedModel:
    """24 layers without weights."""
    config = Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=256, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def bytes_of(model: PreTrainedModel) -> int:
    return sum(weights.numel() * 4 for weights in model.parameters())


def test_a_model_that_fits_on_no_gpu_lies_on_two_in_the_order_of_the_forward(outline: PreTrainedModel) -> None:
    room = int(bytes_of(outline) * 0.7)
    device_map = balanced_map(outline, {0: room, 1: room}, torch.float32)
    assert set(device_map.values()) == {0, 1}
    layers = [device_map[f"model.layers.{n}"] for n in range(24)]
    assert layers == sorted(layers)
    assert not any(name.count(".") > 2 for name in device_map), "a layer is never cut"


def test_half_precision_needs_half_the_room(outline: PreTrainedModel) -> None:
    room: dict[int, int] = dict.fromkeys((0, 1), int(bytes_of(outline) * 0.4))
    assert balanced_map(outline, room, torch.bfloat16)
    with pytest.raises(UserError, match=r"devices: the model does not fit .* of cuda:0, .* of cuda:1; name more"):
        balanced_map(outline, room, torch.float32)


def test_a_balanced_model_is_refused_off_gpus(model_dir: Path) -> None:
    config = ServeConfig(model=str(model_dir), devices=["cpu", "meta"], device_map="balanced")
    with pytest.raises(UserError, match="devices: a balanced model lies on GPUs only"):
        device_maps(config)


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"devices": ["cpu"]}, {"devices": ["cpu", "cpu"]}])
def test_a_replica_has_one_device(model_dir: Path, settings: dict[str, str | list[str]]) -> None:
    maps = device_maps(ServeConfig.model_validate({"model": str(model_dir), **settings}))
    assert maps == [{"": torch.device("cpu")}] * max(1, len(settings.get("devices", [])))
    model = load_mapped_model(str(model_dir), revision=None, device_map=maps[0], dtype="auto")
    assert describe_devices(model) == "cpu"
    assert device_map_of(model) == maps[0]
