"""When completions end, and how, with a model that says what it is told to say."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion
from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.sampler import SamplingParams
from shared.errors import UserError
from tests.policy_trainer.sampling.test_greedy import ids_of

Make = Callable[..., Any]


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
        self.config = SimpleNamespace(_attn_implementation="none")
        self.widths: list[int] = []

    def eval(self) -> "Scripted":
        return self

    def set_attn_implementation(self, name: str) -> None:
        assert name == self.config._attn_implementation

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
        assert [c.eos for c in completions] == [True, True]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_the_length_limit_does_not_finish(self, tokenizer: PreTrainedTokenizerFast, limit: int) -> None:
        (completion,), _ = self.say(tokenizer, [[40, 41, 42, 43]], limit=limit)
        assert completion.ids.tolist() == [40, 41, 42][:limit]
        assert completion.finished is False

    def test_an_eos_at_the_limit_finishes(self, tokenizer: PreTrainedTokenizerFast) -> None:
        completions, _ = self.say(tokenizer, [[40, 41, 1], [40, 41, 42]], limit=3)
        assert [c.finished for c in completions] == [True, False]
        assert [c.eos for c in completions] == [True, False]

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
        assert (completion.finished, completion.eos) == (True, False)

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
        with pytest.raises(UserError, match="EOS"):
            HFSampler(model, nothing)
