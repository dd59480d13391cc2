"""Checks of the machine: versions, devices, memory."""

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from policy_trainer.config import INLINE
from policy_trainer.doctor.findings import Finding, ok, warning, wrong
from policy_trainer.doctor.subject import Subject
from policy_trainer.reporting.tracking import refuse_missing
from policy_trainer.sampling.engines import check_engine
from policy_trainer.trainer.machine import MAIN_MEMORY, memory_size
from policy_trainer.trainer.plan import load_teacher_outline, plan
from policy_trainer.trainer.reference_servers import reference_device
from policy_trainer.trainer.shortages import GB, shortages
from shared.devices import choose_device, describe_device

_PACKAGE = "tandem-grpo"
_SHOWN = ("torch", "transformers", "vllm")
_DRIVER = Path("/proc/driver/nvidia/version")
_INSTALL = "install PyTorch for this machine (pytorch.org/get-started), or say --device cpu"


def versions(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a tracker or an engine that is asked for and is not installed."""
    yield from _ranges()
    refuse_missing(subject.config.report_to)
    if subject.config.sampler == "vllm":
        check_engine(subject.config, lora_rank=subject.config.lora.rank)


def _ranges() -> Iterator[Finding]:
    try:
        needed = [Requirement(text) for text in requires(_PACKAGE) or []]
    except PackageNotFoundError:
        yield warning(f"{_PACKAGE} is not installed, so the versions that it needs are not known", "pip install -e .")
        return
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    unfit = [one for one in needed if not _fits(one)]
    for one in unfit:
        found = _installed(one.name)
        yield wrong(
            f"{one.name} {found or 'is not installed'}: {_PACKAGE} needs {one.name}{one.specifier}",
            f"pip install '{one.name}{one.specifier}'",
        )
    if not unfit:
        shown = [f"{name} {found}" for name in _SHOWN if (found := _installed(name))]
        yield ok(f"{_PACKAGE} {version(_PACKAGE)}, Python {platform.python_version()}, {', '.join(shown)}")


def _fits(needed: Requirement) -> bool:
    found = _installed(needed.name)
    return found is not None and needed.specifier.contains(found, prereleases=True)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a device that is not there."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpus = [_describe_gpu(index) for index in range(torch.cuda.device_count())]
        used = describe_device(subject.config.device)
        if subject.config.server == INLINE:
            choose_device(reference_device(subject.config.reference.device, subject.config.device))
    for words in dict.fromkeys(str(one.message) for one in said):  # of a driver that is too old, or a GPU that is
        yield warning(f"PyTorch says: {' '.join(words.split())}", f"update the driver, or {_INSTALL}")
    if not gpus and not said and _DRIVER.exists():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield warning(f"there is an NVIDIA driver, and PyTorch, built {built}, finds no GPU", _INSTALL)
    cores, free = psutil.cpu_count(), psutil.virtual_memory().available
    yield ok("; ".join([f"the policy on {used}", *gpus, f"{cores} CPU cores, {free / GB:.1f} GB of main memory free"]))


def _describe_gpu(index: int) -> str:
    free, whole = torch.cuda.mem_get_info(index)
    return f"cuda:{index} {torch.cuda.get_device_name(index)}, {free / GB:.1f} of {whole / GB:.1f} GB free"


def memory(subject: Subject) -> Iterator[Finding]:
    """By the plan of `policy-trainer plan`. Raises UserError for a prompt that cannot fit the context."""
    config = subject.config
    needs = plan(config, subject.outline, None, 1, load_teacher_outline(config))
    short = shortages(config, needs, None)
    for one in short:
        yield wrong(str(one).partition(";")[0], f"one of: {', '.join(one.remedies)}")
    for place in dict.fromkeys(need.memory for need in needs):
        size, free = memory_size(place, None), _free(place)
        needed = sum(need.total for need in needs if need.memory == place)
        if size is None or free is None or needed > size:
            continue
        said = f"{place}: about {needed / GB:.1f} GB needed, {free / GB:.1f} of {size / GB:.1f} GB free"
        yield ok(said) if needed <= free else warning(said, "end other programs that use it")


def _free(place: str) -> int | None:
    """Bytes; None where they are not known."""
    if place == MAIN_MEMORY:
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(choose_device(place))[0] if place.startswith("cuda") else None
