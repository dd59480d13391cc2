"""Running batches with transformers: rows that join and leave are sampled as if each were computed by itself."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling import decoders, prefix_cache, running
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import RunningBatch, SamplingParams, sample
from shared.logprobs import PlainForward
from shared.logprobs.attention import attention_of
from tests.policy_trainer.rollout.sampling.architectures import (
    ARCHITECTURES,
    NO_TOKEN,
    PROMPTS,
    VOCABULARY,
    generate,
    texts,
)
from tests.rounding import rounding

Make = Callable[..., Any]
GREEDY = SamplingParams(1, 1, temperature=0)
SAMPLED = SamplingParams(1, 1, temperature=0.8)


def finish(batch: RunningBatch) -> dict[int, Completion]:
    """The completions of all rows that are left."""
    ended: dict[int, Completion] = {}
    while len(batch):
        ended |= dict(batch.advance())
    return ended


@dataclass(frozen=True)
class Join:
    """calls: of `advance` before it. again: how many tokens follow its completion as the prompt of another turn."""

    calls: int
    prompt: int
    rows: int
    limit: int
    again: int


joins = st.lists(
    st.builds(
        Join,
        st.integers(0, 6),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 3),
        st.integers(1, 40),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


class Schedule:
    """Runs joins, and remembers each row's turns: prompts with their completions."""

    def __init__(self, batch: RunningBatch, schedule: Sequence[Join]) -> None:
        self.turns: list[tuple[EncodedPrompt, Completion]] = []
        self._batch = batch
        self._running: dict[int, tuple[EncodedPrompt, int]] = {}
        self._numbers = 0
        for join in schedule:
            self._advance(join.calls)
            self._add(texts([PROMPTS[join.prompt]])[0], join.rows, join.limit, join.again)
        while len(batch):
            self._advance(1)
        assert not self._running

    def _add(self, prompt: EncodedPrompt, rows: int, limit: int, again: int) -> None:
        numbers = range(self._numbers, self._numbers + rows)
        self._numbers += rows
        self._running |= dict.fromkeys(numbers, (prompt, again))
        self._batch.add(numbers, prompt, limit)

    def _advance(self, calls: int) -> None:
        for _ in range(calls):
            for row, completion in self._batch.advance():
                prompt, again = self._running.pop(row)
                self.turns.append((prompt, completion))
                if again:
                    longer = [*prompt.ids, *completion.ids.tolist(), *range(10, 10 + again)]
                    self._add(EncodedPrompt(longer), 1, 5, 0)
            assert len(self._batch) == len(self._running)


def made(architecture: str, eos: int) -> PreTrainedModel:
    """Every `eos`-th token ends a completion."""
    torch.manual_seed(3)
    model = ARCHITECTURES[architecture]().eval()
    model.generation_config = GenerationConfig(eos_token_id=list(range(1, VOCABULARY, eos)), pad_token_id=0)
    return model


@pytest.mark.parametrize(
    "architecture", ["qwen2", "gpt2", "gemma2", "gpt-oss", "llama4", "qwen3.5", "falcon-h1", "deepseek-v3", "stablelm"]
)
@settings(max_examples=8)
@given(schedule=joins, seed=st.integers(0, 3), copied=st.sampled_from([0, 64]), prefill=st.sampled_from([10, 2**16]))
def test_log_probs_are_those_of_each_row_by_itself(
    tokenizer: PreTrainedTokenizerFast, architecture: str, schedule: list[Join], seed: int, copied: int, prefill: int
) -> None:
    """copied: prompts that are longer are shared by their rows until others join. prefill: its limit of tokens."""
    model = made(architecture, eos=20)
    with pytest.MonkeyPatch.context() as patch, HFSampler(model, tokenizer).running_batch(SAMPLED, seed) as batch:
        patch.setattr(decoders, "_COPIED_TOKENS", copied)
        patch.setattr(running, "_PREFILL_TOKENS", prefill)
        turns = Schedule(batch, schedule).turns
    groups = [group_tokens(prompt, [completion]) for prompt, completion in turns]
    with torch.no_grad():
        expected = PlainForward(model)([tokens for tokens, _, _ in groups], [0.8] * len(groups)).numpy()
    captured = np.concatenate([logps for _, logps, _ in groups])
    assert captured.dtype == np.float32
    assert np.abs(captured - expected).max() < rounding(max(8, np.abs(expected).max()))


def test_in_bfloat16_as_exact_as_a_plain_forward(tokenizer: PreTrainedTokenizerFast) -> None:
    model = made("qwen2", eos=20).bfloat16()
    schedule = [Join(0, 2, 3, 30, 4), Join(3, 0, 2, 20, 8), Join(2, 4, 1, 40, 0)]
    with HFSampler(model, tokenizer).running_batch(SAMPLED, 0) as batch:
        turns = Schedule(batch, schedule).turns
    groups = [group_tokens(prompt, [completion]) for prompt, completion in turns]
    captured = np.concatenate([logps for _, logps, _ in groups])
    with torch.no_grad():
        plain, exact = (
            PlainForward(each)([tokens for tokens, _, _ in groups], [0.8] * len(groups)).double().numpy()
            for each in (model, copy.deepcopy(model).double())
        )
    assert np.abs(captured - exact).mean() < 2 * np.abs(plain - exact).mean()


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_tokens_of_rows_that_join_later_are_those_of_generate(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, penalty: float
) -> None:
    """The penalty falls on all tokens of a row, of no other row, and of no padding."""
    model = make_tiny(eos=7)
    params = SamplingParams(1, 1, temperature=0, repetition_penalty=penalty)
    ended: dict[int, Completion] = {}
    with HFSampler(model, tokenizer).running_batch(params, 0) as batch:
        for row in (3, 1, 2, 4, 0):
            batch.add([row], texts([PROMPTS[row]])[0], 24)
            for _ in range(3):
                ended |= dict(batch.advance())
        ended |= finish(batch)
    options = {} if penalty == 1 else {"repetition_penalty": penalty}
    assert [ended[row].ids.tolist() for row in range(5)] == [generate(model, ids, 24, **options) for ids in PROMPTS]


def test_a_turn_ends_and_goes_on_as_one_long_completion(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    """Greedy turns of 1, 2 and 50 tokens, next to rows that stay; the room grows meanwhile."""
    model = make_tiny(eos=NO_TOKEN)
    ids: list[int] = []
    with HFSampler(model, tokenizer).running_batch(GREEDY, 0) as batch:
        batch.add([1, 2], texts([[7, 8, 9]])[0], 90)
        for limit in (1, 2, 50):
            batch.add([0], EncodedPrompt([5, 6, *ids]), limit)
            while not (ended := batch.advance()):
                pass
            ((row, completion),) = ended
            assert (row, len(completion.ids), completion.finished) == (0, limit, False)
            ids += completion.ids.tolist()
        assert len(batch) == 2
    assert ids == generate(model, [5, 6], 53)


@pytest.mark.parametrize("copied", [0, 64])
def test_short_rows_join_after_a_long_one_has_left(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """Its columns are no longer computed."""
    monkeypatch.setattr(decoders, "_COPIED_TOKENS", copied)
    model = make_tiny(eos=NO_TOKEN)
    long, short = [5 + place % 20 for place in range(80)], [[5], [7, 8, 9], [40, 41], [6]]
    with HFSampler(model, tokenizer).running_batch(GREEDY, 0) as batch:
        batch.add([9], EncodedPrompt(long), 1)
        batch.add([0], EncodedPrompt(short[0]), 20)
        assert [row for row, _ in batch.advance()] == [9]
        for row in (1, 2, 3):
            batch.add([row], EncodedPrompt(short[row]), 20)
        ended = finish(batch)
    assert [ended[row].ids.tolist() for row in range(4)] == [generate(model, ids, 20) for ids in short]


def test_there_are_few_batches_of_rows_that_cannot_join_others(tokenizer: PreTrainedTokenizerFast) -> None:
    """16 rows that join one by one, of a model with an attention of its own; each is what it is by itself."""
    model = made("stablelm", eos=20)
    model.generation_config = GenerationConfig(eos_token_id=NO_TOKEN, pad_token_id=0)
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, arguments, given: widths.append(len(given["input_ids"])), with_kwargs=True
    )
    ended: dict[int, Completion] = {}
    with HFSampler(model, tokenizer).running_batch(GREEDY, 0) as batch:
        for row in range(16):
            batch.add([row], texts([[5 + row, 6]])[0], 20)
            before = len(widths)
            ended |= dict(batch.advance())
            assert len(widths) - before == (row + 1).bit_count()
        ended |= finish(batch)
    assert [ended[row].ids.tolist() for row in range(16)] == [generate(model, [5 + row, 6], 20) for row in range(16)]


def test_an_empty_batch(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    with HFSampler(make_tiny(eos=NO_TOKEN), tokenizer).running_batch(GREEDY, 0) as batch:
        assert (len(batch), batch.advance()) == (0, [])
        batch.add([3], texts([[5]])[0], 1)
        assert [row for row, _ in batch.advance()] == [3]
        assert (len(batch), batch.advance()) == (0, [])


@pytest.mark.parametrize("copied", [0, 64])
def test_a_prefill_has_a_limit(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """What does not fit is prefilled next; a prompt that is longer than the limit by itself. All are one batch."""
    monkeypatch.setattr(decoders, "_COPIED_TOKENS", copied)
    model = make_tiny(eos=NO_TOKEN)
    widths: list[tuple[int, int]] = []

    def counted(model: Any, prompts: Sequence[EncodedPrompt], vision: Any) -> Any:
        widths.append((len(prompts), max(map(len, prompts))))
        return prefill(model, prompts, vision)

    prefill = prefix_cache.prefill
    monkeypatch.setattr(prefix_cache, "prefill", counted)
    monkeypatch.setattr(running, "_PREFILL_TOKENS", 8)
    with HFSampler(model, tokenizer).running_batch(GREEDY, 0) as batch:
        for row, prompt in enumerate(texts(PROMPTS)):
            batch.add([row], prompt, 12)
        ended = finish(batch)
    assert widths == [(2, 3), (1, 9), (1, 2), (1, 6)]
    assert [ended[row].ids.tolist() for row in range(5)] == [generate(model, ids, 12) for ids in PROMPTS]


def test_the_seed_decides_and_the_model_is_as_before(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny(eos=NO_TOKEN)
    before = attention_of(model)
    drawn = []
    for seed in (5, 5, 6):
        with HFSampler(model, tokenizer).running_batch(SAMPLED, seed) as batch:
            batch.add([0, 1], texts([[5]])[0], 10)
            drawn.append({row: completion.ids.tolist() for row, completion in finish(batch).items()})
        assert attention_of(model) == before
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    sampler = HFSampler(model, tokenizer)
    refused = pytest.raises(AssertionError, match="a running batch has the model")
    with refused, sampler.running_batch(SAMPLED, 0) as batch:
        batch.add([0], texts([[5]])[0], 10)
        batch.advance()
        batch.advance()
        sample(sampler, texts([[5]]), SAMPLED, 0)
    assert attention_of(model) == before
    sample(sampler, texts([[5]]), SAMPLED, 0)
