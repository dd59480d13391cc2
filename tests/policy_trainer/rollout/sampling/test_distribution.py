"""Completions compared with their exact probabilities, from a forward in float64.

Each test is Pearson's chi-square over all completions that there can be. Its bound is passed by chance once in 10,000
seeds; the seed is fixed, so that no test ever flickers.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from tests.policy_trainer.rollout.sampling.architectures import NO_TOKEN, texts

Make = Callable[..., Any]
Warp = Callable[[Tensor], Tensor]
Counts = dict[tuple[int, ...], float]

VOCABULARY = 6
EOS = 4
TOKENS = 3
DRAWS = 6000
# Of different lengths, so that one is padded.
PROMPTS = ((2, 3, 1), (5,))
# The 99.99 % point of the normal distribution.
Z = 3.719


@pytest.fixture(params=[EOS, NO_TOKEN], ids=["rows that leave", "none leaves"])
def tiny(request: pytest.FixtureRequest, make_tiny: Make) -> PreTrainedModel:
    return make_tiny(seed=1, vocabulary=VOCABULARY, eos=request.param)


def count(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **params: Any) -> list[Counts]:
    """How often each completion was drawn for each prompt."""
    wanted = SamplingParams(DRAWS, TOKENS, **params)
    counts: list[Counts] = []
    for group in sample(HFSampler(model, tokenizer), texts(PROMPTS), wanted, seed=11):
        counts.append({})
        for completion in group:
            ids = tuple(completion.ids.tolist())
            counts[-1][ids] = counts[-1].get(ids, 0) + 1
    return counts


def test_a_running_batch(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Half of the rows join after the others have begun."""
    counts: list[Counts] = [{}, {}]
    with HFSampler(tiny, tokenizer).running_batch(SamplingParams(1, 1, temperature=1.0), seed=11) as batch:
        for part in range(2):
            for number, prompt in enumerate(texts(PROMPTS)):
                first = (2 * part + number) * DRAWS
                batch.add(range(first, first + DRAWS // 2), prompt, TOKENS)
            while len(batch) > DRAWS // 2 * (1 - part):
                for row, completion in batch.advance():
                    ids = tuple(completion.ids.tolist())
                    number = row // DRAWS % 2
                    counts[number][ids] = counts[number].get(ids, 0) + 1
                if not part:
                    break
    expected = expect(tiny, at(1.0))
    assert sum(map(sum, (each.values() for each in counts))) == 2 * DRAWS
    assert excess(counts, expected) < 1
    assert excess(counts, expect(tiny, at(1.2))) > 2


def expect(model: PreTrainedModel, warp: Warp, prompts: Any = PROMPTS) -> list[Counts]:
    """How often it should have been, from logits -> probabilities of the next token."""
    exact = copy.deepcopy(model).double()

    def grow(prompt: tuple[int, ...], ids: tuple[int, ...], probability: float) -> Counts:
        if len(ids) == TOKENS or ids[-1:] == (model.config.eos_token_id,):
            return {ids: DRAWS * probability}
        with torch.no_grad():
            nexts = warp(exact(torch.tensor([prompt + ids])).logits[:, -1])[0].tolist()
        counts: Counts = {}
        for token, share in enumerate(nexts):
            counts |= grow(prompt, (*ids, token), probability * share)
        return counts

    return [grow(prompt, (), 1.0) for prompt in prompts]


def excess(counts: list[Counts], expected: list[Counts]) -> float:
    """Chi-square as a share of its bound, the prompts' larger one; completions that are rarer than 5 count as one."""
    return max(_excess(*pair) for pair in zip(counts, expected, strict=True))


def _excess(counts: Counts, expected: Counts) -> float:
    assert all(expected[ids] > 0 for ids in counts), "an impossible completion"
    pairs = [(counts.get(ids, 0), often) for ids, often in expected.items() if often >= 5]
    pairs.append((DRAWS - sum(seen for seen, _ in pairs), DRAWS - sum(often for _, often in pairs)))
    pairs = [(seen, often) for seen, often in pairs if often > 1]
    freedom = len(pairs) - 1
    # Wilson and Hilferty (1931)
    bound = freedom * (1 - 2 / (9 * freedom) + Z * (2 / (9 * freedom)) ** 0.5) ** 3
    return sum((seen - often) ** 2 / often for seen, often in pairs) / bound


def at(temperature: float) -> Warp:
    return lambda logits: (logits / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_three_tokens(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float) -> None:
    counts = count(tiny, tokenizer, temperature=temperature, top_k=99)  # more than there are: off
    assert excess(counts, expect(tiny, at(temperature))) < 1
    assert excess(counts, expect(tiny, at(1.2))) > 2, "another temperature must not pass"


def nucleus(logits: Tensor) -> Tensor:
    """The fewest likeliest tokens that hold at least 0.5 (Holtzman et al., 2020)."""
    p, order = logits.softmax(-1).sort(descending=True)
    return torch.zeros_like(p).scatter(1, order, p * (p.cumsum(-1) - p < 0.5))


WARPS: dict[str, tuple[dict[str, Any], Warp]] = {
    "top_p": ({"top_p": 0.5}, nucleus),
    "top_k": ({"top_k": 2}, lambda logits: logits.softmax(-1) * (logits >= logits.topk(2).values[:, -1:])),
    # Tokens at least 0.4 times as likely as the likeliest (Nguyen et al., 2024).
    "min_p": ({"min_p": 0.4}, lambda logits: logits.softmax(-1) * (logits - logits.amax() >= math.log(0.4))),
}


@pytest.mark.parametrize("warp", WARPS)
def test_masks_hold_what_was_kept(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, warp: str) -> None:
    """And log-probs are of the distribution over it, whatever the repetition penalty."""
    given, kept = WARPS[warp]
    exact = copy.deepcopy(tiny).double()
    for penalty in (1.0, 1.3):
        params = SamplingParams(
            20, TOKENS, 0.8, **{"top_k": 512, **given}, repetition_penalty=penalty, sampling_masks=True
        )
        groups = sample(HFSampler(tiny, tokenizer), texts(PROMPTS), params, seed=1)
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                mask, ids = completion.sampling_mask, completion.ids.tolist()
                assert mask is not None and len(mask.counts) == len(ids)
                ids_kept = torch.tensor(mask.token_ids).split(mask.counts.tolist())
                with torch.no_grad():
                    logits = exact(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
                for row, token, of_token, logp in zip(logits, ids, ids_kept, completion.logps, strict=True):
                    if penalty == 1:
                        assert torch.equal(of_token, kept(row[None])[0].nonzero()[:, 0])
                    assert abs(row[of_token].log_softmax(0)[of_token.tolist().index(token)] - logp) < 1e-5


@pytest.mark.parametrize("warp", WARPS)
def test_only_some_tokens_are_drawn(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, warp: str) -> None:
    params, kept = WARPS[warp]
    expected = expect(tiny, lambda logits: kept(logits) / kept(logits).sum(-1, keepdim=True))
    assert any(often == 0 for often in expected[0].values())
    assert excess(count(tiny, tokenizer, temperature=1.0, **params), expected) < 1
