"""Writes the verdicts of docs/models.md: `.venv/bin/python -m tools.models_page`. It takes a minute on one core.

Each verdict is that of a tiny model of the architecture.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.errors import UserError
from shared.logprobs import choose_forward, placeholders_of
from tests.rounding import rounding
from tests.tiny_models import ARCHITECTURES, LAYERS, VOCABULARY, make_tiny

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by tools/models_page.py: begin -->\n", "<!-- end -->\n"
T = TypeVar("T")
REFUSED = "refused"
# Architectures without a tiny model, and speech and image models that write no text by themselves.
LEFT_OUT = {
    "gemma3n": "needs the package timm; its text model is `gemma3n_text`",
    "gemma4_assistant": "drafts for another model, and is no model by itself",
    "gemma4_unified_assistant": "drafts for another model, and is no model by itself",
    "moshi": "writes speech; transformers samples it with a window that its plain forward does not have",
    "musicgen": "writes music",
    "musicgen_melody": "writes music",
}
COMPARED = tuple(name for name in ARCHITECTURES if name not in LEFT_OUT)
_PROMPTS = [[5], [7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28], [40, 41], list(range(50, 70))]
_LIMIT = 12
_ENDS = list(range(3, VOCABULARY, 8))
_HEADS = {
    "packed": "Sampled and trained, with packed log-probs (the fastest form)",
    "padded": "Sampled and trained, with padded log-probs",
    "plain": "Sampled and trained, with plain log-probs (the model's own logits: more memory)",
    "": "Refused at the start by `--sampler hf`; trained on samples of `--sampler vllm`, where vLLM knows them",
    REFUSED: "Refused at the start, by trainer and reference server too",
}
_INTRO = f"""
What a tiny random model of each causal architecture of transformers {transformers.__version__} does. *Sampled*: greedy
tokens and log-probs of `--sampler hf` are those of a plain forward, for prompts of several lengths, for groups that
share a prompt, and for rows that join and leave. *Trained*: so are the log-probs of trainer and reference server.
"""


def verdict(architecture: str) -> tuple[str, str]:
    """How an architecture is sampled: `sampled` or `refused`; and the form of its log-probs, or `refused`.

    Raises AssertionError for a model that is neither refused nor correct.
    """
    model = make_tiny(architecture)
    model.generation_config = GenerationConfig(eos_token_id=_ENDS, pad_token_id=0)
    sampler: Any = HFSampler(model, SimpleNamespace(eos_token_id=_ENDS[0]))  # type: ignore[arg-type]
    forward = _unless_refused(lambda: choose_forward(model))
    sampled = _unless_refused(lambda: [*_rounds(sampler), *_rows_that_join(sampler)])
    for prompt, completion in sampled or []:
        _check_greedy(model, prompt, completion)
    if forward is not None:
        pairs = sampled or [(prompt, _completion([9, 30, 17])) for prompt in _PROMPTS]
        groups = [group_tokens(EncodedPrompt(prompt), [completion])[0] for prompt, completion in pairs]
        with torch.no_grad():
            computed = forward(groups, [1.0] * len(groups)).numpy()
        plain = np.concatenate([_of(_plain(model, *pair), pair[1]) for pair in pairs])
        _check_equal(computed, plain)
    return ("sampled" if sampled else REFUSED), (forward.name if forward else REFUSED)


def _unless_refused(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except UserError as error:
        assert str(error).startswith("model: "), error
        return None


def _rounds(sampler: HFSampler) -> list[tuple[list[int], Completion]]:
    prompts = [EncodedPrompt(ids) for ids in _PROMPTS]
    groups = sample(sampler, prompts, SamplingParams(3, _LIMIT, temperature=0), seed=0)
    return [(prompt, completion) for prompt, group in zip(_PROMPTS, groups, strict=True) for completion in group]


def _rows_that_join(sampler: HFSampler) -> list[tuple[list[int], Completion]]:
    """Adds two rows of a prompt at a time while earlier ones run."""
    ended: dict[int, Completion] = {}
    with sampler.running_batch(SamplingParams(1, 1, temperature=0), 0) as batch:
        for place, ids in enumerate(_PROMPTS):
            batch.add([2 * place, 2 * place + 1], EncodedPrompt(ids), _LIMIT)
            for _ in range(2):
                ended |= dict(batch.advance())
        while len(batch):
            ended |= dict(batch.advance())
    return [(_PROMPTS[row // 2], ended[row]) for row in range(2 * len(_PROMPTS))]


def _check_greedy(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> None:
    plain = _plain(model, prompt, completion)
    expected = _of(plain, completion)
    _check_equal(completion.logps, expected)
    likeliest = plain.index_fill(1, torch.tensor(placeholders_of(model), dtype=torch.long), -torch.inf).amax(1)
    _check_equal(expected, likeliest.numpy())
    stops = np.isin(completion.ids, _ENDS)
    assert not stops[:-1].any() and completion.finished == stops[-1] and (stops[-1] or len(stops) == _LIMIT)


def _plain(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> Tensor:
    """(C, V) log-probs of a forward of one row, without padding or cache."""
    row = torch.tensor([[*prompt, *completion.ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(dim=1)


def _of(logps: Tensor, completion: Completion) -> np.ndarray:
    return logps.gather(1, torch.tensor(completion.ids)[:, None])[:, 0].numpy()


def _check_equal(computed: np.ndarray, expected: np.ndarray) -> None:
    bound = rounding(max(8, float(np.abs(expected).max())), layers=LAYERS)
    assert np.abs(computed - expected).max() < bound, f"differ by {np.abs(computed - expected).max():.2g}"


def _completion(ids: list[int]) -> Completion:
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), True, True)


def listed(page: str) -> dict[str, tuple[str, str]]:
    """The verdicts that a page lists."""
    verdicts: dict[str, tuple[str, str]] = {}
    for form, head in _HEADS.items():
        _, _, rest = page.partition(f"**{head}:**\n")
        names = rest.partition("\n\n")[0].replace("\n", " ").split(", ")
        verdicts |= dict.fromkeys((name.strip("`. ") for name in names if name.strip("`. ")), _verdict(form))
    return verdicts


def _verdict(form: str) -> tuple[str, str]:
    """The verdict of the part of the page with this heading."""
    return {"": (REFUSED, "any"), REFUSED: (REFUSED, REFUSED)}.get(form, ("sampled", form))


def on_the_page(computed: tuple[str, str]) -> tuple[str, str]:
    """A verdict as the page lists it: without a form if the model is not sampled."""
    sampled, form = computed
    return (REFUSED, "any") if sampled == REFUSED and form != REFUSED else computed


def written(page: str, verdicts: dict[str, tuple[str, str]]) -> str:
    """The page, with the part between its markers rewritten."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [_INTRO]
    for form, head in _HEADS.items():
        names = [f"`{name}`" for name, verdict in verdicts.items() if on_the_page(verdict) == _verdict(form)]
        parts.append(f"\n**{head}:**\n{', '.join(names)}.\n" if names else "")
    left = "".join(f"- `{name}`: {why}.\n" for name, why in LEFT_OUT.items())
    return f"{before}{BEGIN}{''.join(parts)}\n**Not tried:**\n\n{left}\n{END}{after}"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    page = written(PAGE.read_text(encoding="utf-8"), {name: verdict(name) for name in COMPARED})
    PAGE.write_text(page, encoding="utf-8")
