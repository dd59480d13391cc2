"""The weights of a vLLM server: which it has, and how a whole model takes their place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policy_trainer.sampling.vllm_client import Refused, VllmClient, answer_field
from policy_trainer.sampling.vllm_worker import PackedHead

# What vLLM calls the weights that a server begins with.
FIRST = "default"
_PACK_HEAD = "pack_head"


@dataclass(frozen=True)
class Loaded:
    """model: what requests ask for. version: of the weights that the server must have. salt: keeps the prompts' keys
    and values apart from those that were computed with other weights."""

    model: str
    version: str = FIRST
    salt: Mapping[str, str] = field(default_factory=dict)


async def load_whole(client: VllmClient, model: Path, mark: str) -> None:
    """Loads the weights, unless another worker of the same run has done so. Completions under way wait meanwhile."""
    if await version(client) == mark:
        await client.post("/resume")  # a worker that was killed may have left the server paused
        return
    await client.post("/pause", mode="keep")
    try:
        await client.post("/update_weight_version", {"new_version": ""})  # from here on the weights may be mixed
        await _rpc(client, "reload_weights", weights_path=str(model.resolve()))
        if await client.config("device_config", "device", kind=str) == "cpu":
            await _rpc(client, _PACK_HEAD)
        await client.post("/update_weight_version", {"new_version": mark})
        await client.post("/reset_prefix_cache")  # frees memory; where it cannot, the salt keeps versions apart
    finally:
        await client.post("/resume")


async def version(client: VllmClient) -> str:
    """Of the server's own weights. Refused with 404 without its development mode."""
    return answer_field(await client.get("/weight_info"), "weight_version", kind=str)


async def _rpc(client: VllmClient, method: str, **arguments: str) -> None:
    """Calls a method of all of vLLM's workers."""
    await client.post("/collective_rpc", {"method": method, "kwargs": arguments})


def refusal(url: str, error: Refused) -> str:
    """For the user."""
    if error.status == 404:
        return (
            f"vllm_url: the vLLM server at {url} takes no new weights: start it with VLLM_SERVER_DEV_MODE=1 in its "
            "environment, as docs/vllm.md shows; vLLM 0.32 or newer"
        )
    if _PACK_HEAD in str(error):
        return (
            f"vllm_url: the vLLM server at {url} is on a CPU, where it would go on with the old LM head: start it with "
            f"--worker-extension-cls {PackedHead.__module__}.{PackedHead.__qualname__}, as docs/vllm.md shows"
        )
    return f"vllm_url: the vLLM server at {url} cannot take up the weights: {error}"
