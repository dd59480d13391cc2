"""Checks of the settings, the machine and the model, before anything is started."""

import gc
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.config.train import cautions
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, UnusablePrompt, prompt_limit
from policy_trainer.data.rendering import end_of_answer
from policy_trainer.data.tasks.compatibility import check_compatibility
from policy_trainer.data.teacher_prompts import with_teacher_prompt
from policy_trainer.reporting.tracking import refuse_missing
from policy_trainer.rollout.sampling.engines import check_engine
from policy_trainer.trainer.doctor.findings import Finding, Subject, ok, warning, wrong
from policy_trainer.trainer.plan import (
    GB,
    MAIN_MEMORY,
    Planner,
    Unplanned,
    load_teacher_outline,
    memory_size,
)
from policy_trainer.trainer.reference_servers import reference_device
from policy_trainer.weights.quantised import check_quantisation, load_base
from shared.devices import choose_device, describe_device
from shared.models import context_length, embedding_rows, eos_token_ids, refuse_unknown_ids
from shared.spelling import spell_setting

_PACKAGE = "tandem-grpo"
_NAMED = ("torch", "transformers", "vllm")
_DRIVER = Path("/proc/driver/nvidia/version")


def _install() -> str:
    return f"install PyTorch for this machine (pytorch.org/get-started), or give {spell_setting('device', 'cpu')}"


def settings(subject: Subject) -> Iterator[Finding]:
    """Warns about settings that are valid but may not do what they seem to, as `train` does."""
    problems = cautions(subject.config)
    yield from (warning(text, "") for text in problems)
    if not problems:
        yield ok("they go together")


def versions(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a tracker or an engine that is asked for and is not installed."""
    yield from _ranges()
    refuse_missing(subject.config.report_to)
    check_quantisation(subject.config.lora)
    if not subject.config.sampler_traits.server:
        check_engine(subject.config, lora_rank=subject.config.lora.rank)


def _ranges() -> Iterator[Finding]:
    try:
        needed = [Requirement(text) for text in requires(_PACKAGE) or []]
    except PackageNotFoundError:
        yield warning(f"{_PACKAGE} is not installed, so the versions that it needs are not known", "pip install -e .")
        return
    needed = [item for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})]
    unfit = 0
    for item in needed:
        installed = _installed(item.name)
        if installed is not None and item.specifier.contains(installed, prereleases=True):
            continue
        unfit += 1
        yield wrong(
            f"{item.name} {installed or 'is not installed'}: {_PACKAGE} needs {item.name}{item.specifier}",
            f"pip install '{item.name}{item.specifier}'",
        )
    if not unfit:
        shown = [f"{name} {number}" for name in _NAMED if (number := _installed(name))]
        yield ok(f"{_PACKAGE} {version(_PACKAGE)}, Python {platform.python_version()}, {', '.join(shown)}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a device that is not there."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        gpus = []
        for index in range(torch.cuda.device_count()):
            free, whole = (size / GB for size in torch.cuda.mem_get_info(index))
            gpus.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {free:.1f} of {whole:.1f} GB free")
        used = describe_device(subject.config.device)
        if subject.config.server == INLINE:
            choose_device(reference_device(subject.config.reference.device, subject.config.device))
    for words in dict.fromkeys(str(item.message) for item in raised):  # about an old driver or GPU
        yield warning(f"PyTorch says: {' '.join(words.split())}", f"update the driver, or {_install()}")
    if not gpus and not raised and _DRIVER.exists():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield warning(f"there is an NVIDIA driver, and PyTorch, built {built}, finds no GPU", _install())
    cores, free = psutil.cpu_count(), psutil.virtual_memory().available
    yield ok("; ".join([f"the policy on {used}", *gpus, f"{cores} CPU cores, {free / GB:.1f} GB of main memory free"]))


def memory(subject: Subject) -> Iterator[Finding]:
    """By the plan of `doctor --plan`. Raises UserError for a prompt that cannot fit the context."""
    config = subject.config
    teacher, longest = load_teacher_outline(config), max(subject.lengths[0], default=None)
    planner = Planner(subject.outline, None, ranks=subject.ranks, teacher=teacher, prompt=longest)
    try:
        needs = planner.needs(config)
    except Unplanned as error:
        yield warning(str(error), "watch the memory of the first steps")
        return
    certain = {shortage.memory for shortage in planner.shortages(config, at_least=True)}
    for shortage in planner.shortages(config):
        seen, remedy = shortage.problem, f"one of: {', '.join(shortage.remedies)}"
        if shortage.memory in certain:
            yield wrong(seen, remedy)
        else:
            yield warning(f"{seen} if all completions have the maximum length", remedy)
    for place in dict.fromkeys(need.memory for need in needs):
        size, free = memory_size(place, None), _free(place)
        needed = sum(need.total for need in needs if need.memory == place)
        if size is None or free is None or needed > size:
            continue
        seen = f"{place}: about {needed / GB:.1f} GB needed, {free / GB:.1f} of {size / GB:.1f} GB free"
        yield ok(seen) if needed <= free else warning(seen, "end other programs that use it")


def _free(place: str) -> int | None:
    """Bytes; None where they are not known."""
    if place == MAIN_MEMORY:
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(choose_device(place))[0] if place.startswith("cuda") else None


# Characters of a prompt that are shown.
_SHOWN = 160


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a missing model or tokenizer, and for a model without an EOS token or an embedding row for
    it."""
    outline, tokenizer = subject.outline, subject.tokenizer
    rows, context = embedding_rows(outline), context_length(outline)
    refuse_unknown_ids(eos_token_ids(outline, tokenizer), outline, tokenizer)
    yield ok(
        f"{type(outline).__name__}, {_count(outline.num_parameters())} parameters; {len(tokenizer)} tokens in "
        f"{rows} rows; context {'without a bound' if context is None else context}"
    )


def weights(subject: Subject) -> Iterator[Finding]:
    """Loads them and lets go of them, except under torchrun, where each rank loads its part later.

    Raises UserError for files that are missing or damaged.
    """
    if subject.world is not None:
        yield ok(f"each of {subject.ranks} ranks loads its part when the group is trained")
        return
    config, began = subject.config, time.monotonic()
    model = load_base(config.model, config.lora, revision=config.revision, device=config.device, dtype=config.dtype)
    seconds = time.monotonic() - began
    broken = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    about = f"{str(model.dtype).removeprefix('torch.')} on {model.device}, loaded in {seconds:.1f} s"
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if broken:
        yield wrong(
            f"{len(broken)} tensors hold NaN or infinite values, {broken[0]} first: every log-prob would be NaN",
            "take the model's files from their source again, or a checkpoint from before the values broke",
        )
    else:
        yield ok(f"{about}; all values are finite")


def ends(subject: Subject) -> Iterator[Finding]:
    """What ends a completion; the prompts' check warns of a chat template that ends answers with something else."""
    tokenizer = subject.tokenizer
    ids = eos_token_ids(subject.outline, tokenizer)
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ids)
    chats = PromptEncoder(tokenizer, subject.config.data).in_chat(subject.drawn[0])
    alike = chats and end_of_answer(tokenizer) in ids
    yield ok(f"sampling stops at {names}" + (", as the chat template does" if alike else ""))


def prompts(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a chat template that is missing or cannot be used, and for a context that is too small."""
    config = subject.config
    for remark in check_compatibility(config, subject.task, subject.tokenizer, subject.outline):
        yield warning(remark.seen, remark.remedy)
    encoder, limit = subject.encoder, prompt_limit(subject.outline, config)
    template = config.data.teacher_prompt_template
    made = [(problem, encoder.encode(problem)) for problem in subject.drawn if _is_usable(encoder, problem)]
    if not made:  # later ones are usable
        yield from _lengths(subject, limit)
        return
    first, encoded = made[0]
    ways = [encoder.way(problem) for problem, _ in made]
    others = "" if len(set(ways)) == 1 else f"; the next: {', '.join(ways[1:])}"
    if encoder.in_chat(first) and not encoder.opens_answer(first):
        yield warning(
            "the chat template writes nothing for add_generation_prompt: the model may go on with the question",
            f"correct the chat template, or give {spell_setting('data.prompt_style', 'plain')}",
        )
    yield ok(f"the first goes {ways[0]}{others}: {_shown(subject, encoded.unexpanded_ids)}")
    if template is not None:
        try:
            read = with_teacher_prompt(encoded, first, template, encoder).teacher_ids
            yield ok(f"the teacher reads in its place: {_shown(subject, read)}")
        except UnusablePrompt as error:
            yield wrong(error.problem, error.remedy)
    if any(prompt.images for _, prompt in made):
        yield ok("; ".join(_pictures(prompt) for _, prompt in made))
    yield from _lengths(subject, limit)


def _shown(subject: Subject, ids: Sequence[int]) -> str:
    text = repr(subject.tokenizer.decode(list(ids)))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _is_usable(encoder: PromptEncoder, problem: Problem) -> bool:
    with suppress(UnusablePrompt):
        encoder.encode(problem)
        return True
    return False


def _pictures(prompt: EncodedPrompt) -> str:
    """How many tokens the pictures of a prompt take, with those that the processor writes around them."""
    count = len(prompt.pictures)
    tokens = len(prompt.ids) - len(prompt.unexpanded_ids) + count
    return f"{count} pictures of {tokens} tokens" if count != 1 else f"a picture of {tokens} tokens"


def _lengths(subject: Subject, limit: int) -> Iterator[Finding]:
    """At least one problem has a usable prompt, or the check would have ended already."""
    lengths, unusable = subject.lengths
    count = len(lengths) + len(unusable)
    if unusable:
        yield warning(
            f"{len(unusable)} of {count} problems have unusable prompts and will be left out: {unusable[0]}",
            "correct or remove these rows",
        )
    long = sum(length > limit for length in lengths)
    seen = f"{len(lengths)} prompts have {min(lengths)} to {max(lengths)} tokens; the limit is {limit}"
    remedy = _room(subject.config, limit, max(lengths))
    if not long:
        yield ok(seen)
    elif long == len(lengths) or subject.config.data.too_long == "refuse":
        yield wrong(f"{seen}: {long} are too long", remedy)
    else:
        yield warning(f"{seen}: {long} are too long and will be left out", remedy)


def _room(config: TrainConfig, limit: int, longest: int) -> str:
    if limit < config.data.max_prompt_length:  # the context is the bound
        return (
            f"lower {spell_setting('sampling.max_completion_length')}, or shorten "
            f"{spell_setting('data.system_prompt')}: both share the model's context"
        )
    return f"{spell_setting('data.max_prompt_length')} {longest}, or a shorter {spell_setting('data.system_prompt')}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
