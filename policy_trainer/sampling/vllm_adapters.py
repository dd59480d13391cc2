"""What a LoRA run asks of vLLM: engines that take adapters, and a server that loads and unloads them by name."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from policy_trainer.adapters.adapter import WEIGHTS
from policy_trainer.sampling.vllm_client import Refused, Unavailable, VllmClient, answer_field, ask
from shared.errors import UserError
from shared.models import ADAPTER_CONFIG

# The ranks that vLLM's engine can be made for.
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Adapters that a server keeps in main memory. One that it has dropped it reads again, and its engine ends where the
# directory is gone: workers that share a server may sample from so many versions.
_KEPT = 8


def engine_rank(rank: int) -> int:
    """The smallest max_lora_rank that carries adapters of this rank. Raises UserError where there is none."""
    fitting = [engine for engine in _ENGINE_RANKS if engine >= rank]
    if not fitting:
        raise UserError(
            f"lora.rank: vLLM takes adapters up to rank {_ENGINE_RANKS[-1]}, got {rank}: lower it, or use --sampler hf"
        )
    return fitting[0]


def engine_options(rank: int) -> dict[str, Any]:
    """For vLLM's engine, of a run whose adapters have this rank; 0: none."""
    return {"enable_lora": True, "max_lora_rank": engine_rank(rank)} if rank else {}


def server_environment(rank: int) -> str:
    """What stands before `vllm serve` for adapters of this rank; 0: none."""
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True " if rank else ""


def server_flags(rank: int) -> str:
    """The options of `vllm serve` for adapters of this rank; 0: none."""
    return f" --enable-lora --max-lora-rank {engine_rank(rank)} --max-loras 2 --max-cpu-loras {_KEPT}" if rank else ""


def check_takes_adapters(url: str, rank: int) -> None:
    """Raises UserError for a server that would refuse adapters of this rank, or fail with several of them."""
    try:
        fault = _fault(ask(url, lambda client: client.info()), rank)
    except (Unavailable, Refused) as error:
        fault = f"does not say what it was started with ({error})"
    if fault:
        raise UserError(
            f"lora.rank: the vLLM server at {url} {fault}: start it with{server_flags(rank)}, and with "
            f"{server_environment(rank)}VLLM_SERVER_DEV_MODE=1 in its environment; docs/vllm.md has the command"
        )


def _fault(info: Any, rank: int) -> str:
    lora = answer_field(info, "vllm_config", kind=dict).get("lora_config")
    if lora is None:
        return "takes no adapters"
    largest, kept = (answer_field(lora, name, kind=int) for name in ("max_lora_rank", "max_cpu_loras"))
    if largest < rank:
        return f"takes adapters up to rank {largest}, and this run's have rank {rank}"
    if kept < _KEPT:
        return f"keeps {kept} of the adapters that it has loaded, and this run needs {_KEPT}"
    loads = answer_field(info, "vllm_env", kind=dict).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    return "" if loads else "loads no adapters while it runs"


def adapter_name(directory: Path) -> str:
    """The same for all copies of an adapter: workers that download it to places of their own share it on a server.

    Raises FileNotFoundError if it is gone.
    """
    digests = [sha256(file.read_bytes()).digest() for file in (directory / ADAPTER_CONFIG, directory / WEIGHTS)]
    return f"lora-{sha256(b''.join(digests)).hexdigest()[:16]}"


async def load_adapter(client: VllmClient, name: str, directory: Path) -> None:
    """Loads the adapter, unless another worker of the same run has done so. Completions under way go on with theirs."""
    try:
        await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory.resolve())})
    except Refused as error:
        if "already been loaded" not in str(error):
            raise


async def unload_adapter(client: VllmClient, name: str) -> None:
    """Completions under way go on with it."""
    try:
        await client.post("/v1/unload_lora_adapter", {"lora_name": name})
    except Refused as error:
        if error.status != 404:  # another worker has done so
            raise


def adapter_refusal(url: str, error: Refused) -> str:
    """For the user."""
    return (
        f"vllm_url: the vLLM server at {url} cannot take up the adapter: {error}; it must take the run's rank and "
        "layers (docs/vllm.md has the command), and find the adapter under the worker's path; --sampler hf takes any"
    )
