"""The memories of this machine."""

import os

import torch

MAIN_MEMORY = "main memory"


def memory_size(place: str, gpu_bytes: int | None) -> int | None:
    """Bytes of a memory; None where they are not known: elsewhere, and the main memory beside GPUs of `gpu_bytes`."""
    if place == MAIN_MEMORY:
        return None if gpu_bytes else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpu_bytes is None and place in {f"cuda:{index}" for index in range(torch.cuda.device_count())}:
        return torch.cuda.get_device_properties(place).total_memory
    return gpu_bytes
