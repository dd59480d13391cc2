"""Which device a model runs on: `auto` is the GPU where there is one."""

import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.errors import UserError

# Instruction sets by which libraries choose their kernels, as Linux names them.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")
# Messages of out-of-memory errors that have no specific type: from the CPU's allocator, and from libraries that
# allocate by themselves (cuBLAS).
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


def choose_device(name: str) -> torch.device:
    """The device of a setting `device`: auto, cpu, cuda, cuda:1, …

    Raises UserError for a name that PyTorch does not know, and for a GPU that this machine does not have.
    """
    if name == "auto":  # only CUDA, which is also ROCm's name: Apple's and Intel's GPUs are untested
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: {name!r} is no device of PyTorch's", "use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: there is no {name} here: {_gpus()}", "use auto or cpu, or another number")
    return device


def describe_device(name: str) -> str:
    """A readable name of the setting's device: `cuda:0 (NVIDIA H200)`. Raises UserError as choose_device does."""
    device = choose_device(name)
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def describe_processor() -> str:
    """The CPU and those of its instruction sets by which libraries choose kernels: `AMD EPYC, avx2, avx512f`."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # the file exists on Linux only
        return f"{platform.processor() or platform.machine()}, PyTorch's {torch.backends.cpu.get_cpu_capability()}"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    known = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name", platform.machine())
    return ", ".join([name, *(each for each in _INSTRUCTIONS if each in known)])


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16 matrices. True where PyTorch cannot tell."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return True
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def deterministic_operations(device: torch.device) -> Generator[None]:
    """In this block operations on a GPU are deterministic where PyTorch supports it; those on a CPU always are."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def widest_float(device: torch.device) -> torch.dtype:
    """float64, for sums whose order should make no difference; float32 on Apple's GPUs (MPS), which have no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_out_of_memory(error: BaseException) -> bool:
    typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return typed or any(text in str(error) for text in _NO_MEMORY)


def _gpus() -> str:
    count = torch.cuda.device_count()
    return f"the last GPU is cuda:{count - 1}" if count else "PyTorch finds no GPU"
