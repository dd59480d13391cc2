"""Sampling against transformers' own generate, against the learner's log-probs, and against the distribution."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.interface import Completion, SamplingParams, group_tokens
from shared.logprobs import PackedForward, PlainForward, choose_forward
from shared.refusal import Refused

Make = Callable[..., Any]
NO_TOKEN = 10_000


def llama(vocabulary: int, eos: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**small(vocabulary, eos)))


def gemma3(vocabulary: int, eos: int) -> PreTrainedModel:
    """Windows of 6 tokens in one of its two layers."""
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**small(vocabulary, eos), sliding_window=6, layer_types=layers))


def gpt2(vocabulary: int, eos: int) -> PreTrainedModel:
    """Learned positions: a wrong position id is seen at once."""
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, eos_token_id=eos
    )
    return GPT2LMHeadModel(config)


def small(vocabulary: int, eos: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": eos,
        "bos_token_id": None,
        "tie_word_embeddings": False,  # tied, a small Gemma repeats what it hears
    }


@pytest.fixture(params=["qwen2", "llama", "gemma3", "gpt2"])
def model(request: pytest.FixtureRequest, make_tiny: Make) -> PreTrainedModel:
    """One of four architectures. Every fourth token ends a completion, so that rows end at different times."""
    torch.manual_seed(3)
    kinds = {"qwen2": lambda v, eos: make_tiny(seed=3, vocabulary=v, eos=eos), "llama": llama}
    made = (kinds | {"gemma3": gemma3, "gpt2": gpt2})[request.param](96, 1).eval()
    made.generation_config = GenerationConfig(eos_token_id=list(range(1, 96, 4)), pad_token_id=0)
    return made


PROMPTS = [[5], [7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28], [40, 41], [50, 51, 52, 53, 54, 55]]


def generate(model: PreTrainedModel, prompt: Sequence[int], limit: int) -> list[int]:
    """transformers' greedy completion of one prompt on its own."""
    output: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=limit,
    )
    return output[0, len(prompt) :].tolist()


class TestGreedy:
    def test_equals_generate_token_for_token(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        """Prompts of several lengths, groups of three, rows that end one after the other."""
        groups = HFSampler(model, tokenizer).sample(PROMPTS, SamplingParams(3, 24, temperature=0), seed=0)
        expected = [generate(model, prompt, 24) for prompt in PROMPTS]
        assert len({len(ids) for ids in expected}) > 2, "the rows must end at different times"
        for ids, group in zip(expected, groups, strict=True):
            assert len(group) == 3
            for completion in group:
                assert completion.ids.tolist() == ids
                assert completion.finished is (ids[-1] % 4 == 1)

    def test_through_the_trainers_packed_attention(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        """The trainer evaluates with the model that it trains, whose attention is another."""
        model = make_tiny(eos=NO_TOKEN)
        expected = [generate(model, prompt, 12) for prompt in PROMPTS]
        PackedForward(model)
        groups = HFSampler(model, tokenizer).sample(PROMPTS, SamplingParams(2, 12, temperature=0), seed=0)
        assert [group[1].ids.tolist() for group in groups] == expected

    def test_top_k_of_one_is_greedy(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler = HFSampler(make_tiny(eos=NO_TOKEN), tokenizer)
        greedy = sampler.sample(PROMPTS, SamplingParams(1, 12, temperature=0), seed=0)
        one = sampler.sample(PROMPTS, SamplingParams(1, 12, temperature=1.7, top_k=1), seed=5)
        assert ids_of(one) == ids_of(greedy)

    def test_a_model_can_be_trained_after_it_has_sampled(
        self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        model = make_tiny()
        sampler = HFSampler(model, tokenizer)
        (group,) = sampler.sample([[5, 6]], SamplingParams(2, 5, temperature=1.0), seed=0)
        tokens, _, _ = group_tokens([5, 6], group)
        PackedForward(model)([tokens], [1.0]).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


class TestLogps:
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
    def test_equal_those_of_the_learner(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float
    ) -> None:
        """Before top-p and top-k, which renormalise: the learner knows nothing of them."""
        params = SamplingParams(4, 20, temperature, top_p=0.95, top_k=40)
        groups = HFSampler(model, tokenizer).sample(PROMPTS, params, seed=1)
        packed = [group_tokens(prompt, group) for prompt, group in zip(PROMPTS, groups, strict=True)]
        assert len({len(c.ids) for group in groups for c in group}) > 2, "the rows must end at different times"
        captured = np.concatenate([logps for _, logps, _ in packed])
        assert captured.dtype == np.float32
        for forward in (PlainForward(model), choose_forward(model)):
            with torch.no_grad():
                expected = forward([tokens for tokens, _, _ in packed], [temperature] * len(packed)).numpy()
            assert np.abs(captured - expected).max() < 1e-5

    def test_of_greedy_tokens_are_at_temperature_one(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        model = make_tiny(eos=NO_TOKEN)
        (group,) = HFSampler(model, tokenizer).sample([[5, 6]], SamplingParams(1, 8, temperature=0), seed=0)
        tokens, logps, _ = group_tokens([5, 6], group)
        with torch.no_grad():
            assert np.abs(PlainForward(model)([tokens], [1.0]).numpy() - logps).max() < 1e-5


def ids_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.ids.tolist() for completion in group] for group in groups]


class TestDistribution:
    VOCABULARY = 6
    DRAWS = 6000
    PROMPT = (2, 3, 1)

    @pytest.fixture
    def tiny(self, make_tiny: Make) -> PreTrainedModel:
        return make_tiny(seed=1, vocabulary=self.VOCABULARY, eos=NO_TOKEN)

    def pairs(self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **params: Any) -> Tensor:
        """(V, V) how often each pair of first and second token was drawn."""
        wanted = SamplingParams(self.DRAWS, 2, **params)
        (group,) = HFSampler(tiny, tokenizer).sample([self.PROMPT], wanted, seed=11)
        counts = torch.zeros(self.VOCABULARY, self.VOCABULARY, dtype=torch.float64)
        for completion in group:
            counts[tuple(completion.ids.tolist())] += 1
        return counts

    def probabilities(self, tiny: PreTrainedModel, warp: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(V,) of the first token and (V, V) of the second after each first."""
        rows = torch.tensor([[*self.PROMPT, first] for first in range(self.VOCABULARY)])
        with torch.no_grad():
            logits = tiny(rows).logits.double()
        return warp(logits[:1, -2])[0], warp(logits[:, -1])

    def chi_square(self, counts: Tensor, expected: Tensor) -> float:
        possible = expected > 0
        assert counts[~possible].sum() == 0
        return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())

    # The 99.99 % points of chi-square with 5 and with 35 degrees of freedom. The seed is fixed: this never flickers.
    FIRST, PAIRS = 25.7, 76.4

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_first_and_second_token(
        self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float
    ) -> None:
        counts = self.pairs(tiny, tokenizer, temperature=temperature)
        first, second = self.probabilities(tiny, lambda logits: (logits / temperature).softmax(-1))
        assert self.chi_square(counts.sum(1), self.DRAWS * first) < self.FIRST
        assert self.chi_square(counts, self.DRAWS * first[:, None] * second) < self.PAIRS

    def test_would_see_a_wrong_temperature(self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        first, _ = self.probabilities(tiny, lambda logits: (logits / 1.2).softmax(-1))
        counts = self.pairs(tiny, tokenizer, temperature=1.0)
        assert self.chi_square(counts.sum(1), self.DRAWS * first) > 2 * self.FIRST

    @pytest.mark.parametrize("top_p", [0.5, 0.8])
    def test_top_p(self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, top_p: float) -> None:
        """The fewest likeliest tokens that hold at least top_p, renormalised (Holtzman et al., 2020)."""

        def nucleus(logits: Tensor) -> Tensor:
            p, order = logits.softmax(-1).sort(descending=True)
            kept = p * (p.cumsum(-1) - p < top_p)
            return torch.zeros_like(p).scatter(1, order, kept / kept.sum(-1, keepdim=True))

        first, second = self.probabilities(tiny, nucleus)
        counts = self.pairs(tiny, tokenizer, temperature=1.0, top_p=top_p)
        assert 0 < int((first == 0).sum()) < self.VOCABULARY
        assert self.chi_square(counts, self.DRAWS * first[:, None] * second) < self.PAIRS

    def test_top_k(self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        def best_two(logits: Tensor) -> Tensor:
            return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -torch.inf).softmax(-1)

        first, second = self.probabilities(tiny, best_two)
        counts = self.pairs(tiny, tokenizer, temperature=1.0, top_k=2)
        assert self.chi_square(counts, self.DRAWS * first[:, None] * second) < self.PAIRS

    def test_top_k_beyond_the_vocabulary_is_off(
        self, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        assert torch.equal(
            self.pairs(tiny, tokenizer, temperature=1.0, top_k=99), self.pairs(tiny, tokenizer, temperature=1.0)
        )


class TestSeed:
    def test_decides_everything(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler, params = HFSampler(make_tiny(), tokenizer), SamplingParams(4, 10, temperature=1.0)
        first = sampler.sample(PROMPTS, params, seed=7)
        torch.manual_seed(123)
        again = sampler.sample(PROMPTS, params, seed=7)
        assert ids_of(first) == ids_of(again)
        assert all(
            np.array_equal(a.logps, b.logps)
            for one, two in zip(first, again, strict=True)
            for a, b in zip(one, two, strict=True)
        )
        assert ids_of(sampler.sample(PROMPTS, params, seed=8)) != ids_of(first)

    def test_leaves_the_global_generator_alone(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler = HFSampler(make_tiny(), tokenizer)
        before = torch.get_rng_state()
        sampler.sample(PROMPTS, SamplingParams(2, 5, temperature=1.0), seed=7)
        assert torch.equal(torch.get_rng_state(), before)

    def test_completions_of_a_group_differ(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler = HFSampler(make_tiny(eos=NO_TOKEN), tokenizer)
        (group,) = sampler.sample([[5, 6]], SamplingParams(8, 10, temperature=1.0), seed=7)
        assert len({tuple(completion.ids.tolist()) for completion in group}) == 8


class Cache:
    """Knows nothing but which row is which."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = torch.arange(len(self.rows) * repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = self.rows[indices]


class Scripted:
    """A model that says what its script says, whatever it is fed: row i of the batch has script i.

    It also checks that it is fed just what it said.
    """

    device = torch.device("cpu")

    def __init__(self, scripts: Sequence[Sequence[int]], *, vocabulary: int, eos: int | list[int]) -> None:
        longest = max(map(len, scripts))
        self._scripts = torch.tensor([[*script, *[0] * (longest - len(script))] for script in scripts])
        self._vocabulary = vocabulary
        self.generation_config = SimpleNamespace(eos_token_id=eos)
        self.widths: list[int] = []

    def eval(self) -> "Scripted":
        return self

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        cache = past_key_values or Cache(torch.arange(len(input_ids)))
        said = 0
        if past_key_values is not None:
            said = int(position_ids[0, 0]) - 1  # each prompt is two tokens long
            self.widths.append(len(input_ids))
        per_prompt = len(self._scripts) // len(input_ids) if past_key_values is None else 1
        scripts = self._scripts[cache.rows * per_prompt]
        if said:
            alive = scripts[:, said - 1] != 0
            assert torch.equal(input_ids[alive, 0], scripts[alive, said - 1])
        logits = torch.nn.functional.one_hot(scripts[:, said], self._vocabulary).float() * 50
        return SimpleNamespace(logits=logits[:, None], past_key_values=cache)


class TestEnds:
    """Scripted rows, where each may end otherwise than the rest."""

    PROMPT = (9, 9)

    def say(
        self,
        tokenizer: PreTrainedTokenizerFast,
        scripts: Sequence[Sequence[int]],
        *,
        limit: int = 50,
        stop: tuple[str, ...] = (),
        eos: int | list[int] = 1,
    ) -> tuple[list[Completion], Scripted]:
        model: Any = Scripted(scripts, vocabulary=len(tokenizer), eos=eos)
        prompts = [self.PROMPT] * len(scripts)
        params = SamplingParams(1, limit, temperature=0, stop=stop)
        groups = HFSampler(model, tokenizer).sample(prompts, params, seed=0)
        return [completion for (completion,) in groups], model

    def test_eos_is_included_and_finishes(self, tokenizer: PreTrainedTokenizerFast) -> None:
        (completion,), _ = self.say(tokenizer, [[40, 41, 1, 42, 43]])
        assert completion.ids.tolist() == [40, 41, 1]
        assert len(completion.logps) == 3
        assert completion.finished is True

    def test_every_eos_of_the_generation_config_ends(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Its list, and not the tokenizer's own EOS, which is 1."""
        completions, _ = self.say(tokenizer, [[40, 7, 41, 42, 42], [1, 1, 8, 41, 42]], eos=[7, 8])
        assert [c.ids.tolist() for c in completions] == [[40, 7], [1, 1, 8]]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_the_length_limit_does_not_finish(self, tokenizer: PreTrainedTokenizerFast, limit: int) -> None:
        (completion,), _ = self.say(tokenizer, [[40, 41, 42, 43]], limit=limit)
        assert completion.ids.tolist() == [40, 41, 42][:limit]
        assert completion.finished is False

    def test_an_eos_at_the_limit_finishes(self, tokenizer: PreTrainedTokenizerFast) -> None:
        completions, _ = self.say(tokenizer, [[40, 41, 1], [40, 41, 42]], limit=3)
        assert [c.finished for c in completions] == [True, False]

    @pytest.mark.parametrize("seed", range(6))
    def test_any_lengths(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        """Rows that end at random times come out as their scripts say, and ended rows leave the batch."""
        generator = np.random.default_rng(seed)
        lengths = generator.integers(1, 40, 30)
        scripts = [[*generator.integers(30, 60, length).tolist(), 1, 99, 99] for length in lengths]
        completions, model = self.say(tokenizer, scripts, limit=30)
        for script, length, completion in zip(scripts, lengths, completions, strict=True):
            assert completion.ids.tolist() == script[: min(length + 1, 30)]
            assert completion.finished is bool(length < 30)
        assert model.widths[0] == 30 and model.widths[-1] < 30 and sorted(model.widths, reverse=True) == model.widths

    def test_groups_keep_their_order(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Two prompts, three completions each, that differ from the second token on."""
        scripts = [[40, 50, 1], [40, 51, 52, 53, 1], [40, 1, 1], [45, 60, 61, 1], [45, 62, 1], [45, 63, 64, 65, 1]]
        model: Any = Scripted(scripts, vocabulary=len(tokenizer), eos=1)
        groups = HFSampler(model, tokenizer).sample([self.PROMPT] * 2, SamplingParams(3, 9, temperature=0), seed=0)
        expected = [script[: script.index(1) + 1] for script in scripts]
        assert ids_of(groups) == [expected[:3], expected[3:]]

    @pytest.mark.parametrize(
        ("text", "stop", "kept"),
        [
            ("abcdef", ("cd",), "abcd"),
            ("a\n\nb", ("\n\n",), "a\n\n"),
            ("abcdef", ("x", "def", "e"), "abcde"),
            ("<think>1</think><answer>2</answer> and on", ("</answer>",), "<think>1</think><answer>2</answer>"),
            ("<think>1</think><answer>2", ("k><ans",), "<think>1</think><answer>"),
            ("x</think>4 5", ("nk>4",), "x</think>4"),
            ("un café noir", ("é",), "un café"),
            ("1日本語2", ("本語",), "1日本語"),
            ("a😀b", ("😀",), "a😀"),
            ("aab", ("ab",), "aab"),
            ("abab", ("abb", "bab"), "abab"),
        ],
    )
    def test_stop_texts(self, tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...], kept: str) -> None:
        """However many tokens they span: here each byte is a token, and each tag is one."""
        (completion,), _ = self.say(tokenizer, [[*tokenizer.encode(text), 1]], stop=stop)
        assert tokenizer.decode(completion.ids.tolist()) == kept
        assert completion.finished is True

    def test_a_stop_text_that_never_comes(self, tokenizer: PreTrainedTokenizerFast) -> None:
        (completion,), _ = self.say(tokenizer, [tokenizer.encode("abcdef")], stop=("fa", "é"), limit=6)
        assert completion.finished is False and len(completion.ids) == 6

    def test_a_stop_text_is_not_completed_by_the_prompt(self, tokenizer: PreTrainedTokenizerFast) -> None:
        across = str(tokenizer.decode([9, 40]))
        (completion,), _ = self.say(tokenizer, [[40, 41, 1]], stop=(across,))
        assert completion.ids.tolist() == [40, 41, 1]

    def test_a_model_without_any_eos_is_refused(self, make_tiny: Make) -> None:
        model = make_tiny()
        model.generation_config = GenerationConfig()
        nothing: Any = SimpleNamespace(eos_token_id=None)
        with pytest.raises(Refused, match="EOS"):
            HFSampler(model, nothing)


def test_group_tokens_packs() -> None:
    completions = [
        Completion(np.array([4, 5]), np.array([-1.0, -2.0], np.float32), True),
        Completion(np.array([6]), np.array([-3.0], np.float32), False),
    ]
    tokens, logps, finished = group_tokens([1, 2, 3], completions)
    assert tokens.prompt_ids.tolist() == [1, 2, 3]
    assert tokens.completion_ids.tolist() == [4, 5, 6]
    assert tokens.completion_lengths.tolist() == [2, 1]
    assert logps.tolist() == [-1, -2, -3]
    assert finished.tolist() == [True, False]
