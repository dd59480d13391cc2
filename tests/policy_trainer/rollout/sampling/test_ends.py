"""When completions end, and how, with a scripted model."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.decoders import Decoding
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.errors import UserError
from tests.device import DEVICE
from tests.policy_trainer.rollout.sampling.architectures import texts

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script has no answers for other prompts, such as those of the self-test."""
    monkeypatch.setattr("policy_trainer.rollout.sampling.hf.choose_decoding", lambda model: Decoding.REPEATED)


class Cache:
    """Remembers only which row is which."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = self.rows[indices]


class Scripted:
    """A model that writes row i of its script for row i of the batch, and checks that its tokens come back to it."""

    device = DEVICE

    def __init__(self, scripts: Sequence[Sequence[int]], *, vocabulary: int, eos: int | list[int]) -> None:
        longest = max(map(len, scripts))
        self._scripts = torch.tensor([[*script, *[0] * (longest - len(script))] for script in scripts])
        self._vocabulary = vocabulary
        self.generation_config = SimpleNamespace(eos_token_id=eos)
        self.config = PreTrainedConfig()
        self.widths: list[int] = []

    def eval(self) -> "Scripted":
        return self

    def modules(self) -> list[nn.Module]:
        return []

    def get_output_embeddings(self) -> None:
        """It has no LM head."""

    def set_attn_implementation(self, name: str) -> None:
        assert name == self.config._attn_implementation

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        cache = past_key_values or Cache(torch.arange(len(input_ids)))
        length = 0
        if past_key_values is not None:
            length = int(position_ids[0, 0]) - 1  # each prompt is two tokens long
            self.widths.append(len(input_ids))
        per_prompt = len(self._scripts) // len(input_ids) if past_key_values is None else 1
        scripts = self._scripts[cache.rows * per_prompt]
        if length:
            alive = scripts[:, length - 1] != 0
            assert torch.equal(input_ids[alive, 0], scripts[alive, length - 1])
        logits = torch.nn.functional.one_hot(scripts[:, length], self._vocabulary).float() * 50
        return SimpleNamespace(logits=logits[:, None], past_key_values=cache)


class TestEnds:
    """Scripted rows, which end at different places."""

    def say(
        self,
        tokenizer: PreTrainedTokenizerFast,
        scripts: Sequence[Sequence[int]],
        *,
        limit: int = 50,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        eos: int | list[int] = 1,
        prompt: tuple[int, int] = (9, 9),
    ) -> tuple[list[Completion], Scripted]:
        model: Any = Scripted(scripts, vocabulary=len(tokenizer), eos=eos)
        prompts = [prompt] * len(scripts)
        params = SamplingParams(1, limit, temperature=0, stop=stop, stop_token_ids=stop_token_ids)
        groups = sample(HFSampler(model, tokenizer), texts(prompts), params, seed=0)
        completions = [completion for (completion,) in groups]
        again: Any = Scripted(scripts, vocabulary=len(tokenizer), eos=eos)
        ended = self.run(HFSampler(again, tokenizer), texts(prompts), params)
        for completion, same in zip(completions, ended, strict=True):
            assert completion.ids.tolist() == same.ids.tolist()
            assert (completion.finished, completion.eos) == (same.finished, same.eos)
        return completions, model

    def run(self, sampler: HFSampler, prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[Completion]:
        """The same with a running batch."""
        ended: dict[int, Completion] = {}
        with sampler.running_batch(params, seed=0) as batch:
            for row, prompt in enumerate(prompts):
                batch.add([row], prompt, params.max_completion_length)
            while len(batch):
                ended |= dict(batch.advance())
        return [ended[row] for row in range(len(prompts))]

    def test_every_eos_of_the_generation_config_ends(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Its list, and not the tokenizer's EOS, which is 1."""
        scripts = [[40, 7, 41, 42, 42], [1, 1, 1, 8, 42], [40, 41, 42, 43, 44]]
        completions, _ = self.say(tokenizer, scripts, eos=[7, 8], limit=4)
        assert [c.ids.tolist() for c in completions] == [[40, 7], [1, 1, 1, 8], [40, 41, 42, 43]]
        assert [c.finished for c in completions] == [c.eos for c in completions] == [True, True, False]

    def test_further_ids_end_too(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """They are part of the completion, and no EOS."""
        scripts = [[40, 41, 42, 43], [40, 1, 41, 42], [43, 44, 41, 1]]
        completions, _ = self.say(tokenizer, scripts, stop_token_ids=(41, 44), limit=4)
        assert [c.ids.tolist() for c in completions] == [[40, 41], [40, 1], [43, 44]]
        assert [c.finished for c in completions] == [True] * 3 and [c.eos for c in completions] == [False, True, False]

    @pytest.mark.parametrize("seed", range(3))
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

    @pytest.mark.parametrize(
        ("text", "stop", "kept"),
        [
            ("abcdef", ("cd",), "abcd"),
            ("a\n\nb", ("\n\n",), "a\n\n"),
            ("abcdef", ("x", "def", "e"), "abcde"),
            ("<think>1</think><answer>2", ("k><ans",), "<think>1</think><answer>"),
            ("x</think>4 5", ("nk>4",), "x</think>4"),
            ("1日本語2", ("本語",), "1日本語"),
            ("a😀b", ("😀",), "a😀"),
            ("abab", ("abb", "bab"), "abab"),
            ("abcdef", ("fa", "é", "?a"), None),  # the prompt ends with a `?`
        ],
    )
    def test_stop_texts(
        self, tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...], kept: str | None
    ) -> None:
        """However many tokens they span: here each byte is a token, and each tag is one."""
        (question,) = tokenizer.encode("?")
        scripts = [[*tokenizer.encode(text), 1]]
        (completion,), _ = self.say(tokenizer, scripts, stop=stop, prompt=(9, question))
        assert tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True) == (kept or text)
        assert (completion.finished, completion.eos) == (True, kept is None)

    def test_a_model_without_any_eos_is_refused(self, make_tiny: Make) -> None:
        model = make_tiny()
        model.generation_config = GenerationConfig()
        nothing: Any = SimpleNamespace(eos_token_id=None)
        with pytest.raises(UserError, match="EOS"):
            HFSampler(model, nothing)
