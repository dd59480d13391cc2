"""What both forms of the sampler must do, whichever way they reach the engine."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from policy_trainer.data.completion import Completion
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sample
from shared.models import load_model, load_tokenizer
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.vllm.models import EOS, PROMPTS, distance, save_adapted, save_tiny, scoring_distance

UPDATES = 20
PARAMS = SamplingParams(4, 24, temperature=0.7)
# In float32.
TOLERANCE = 1e-4
# Between adapters and their merged copies.
MERGED_TOLERANCE = 1e-5


def plain(groups: Sequence[Sequence[Completion]]) -> list[Any]:
    """Completions as values that can be compared."""
    return [[(item.ids.tolist(), item.logps.tolist(), item.finished, item.eos) for item in group] for group in groups]


def check_sampling(sampler: Sampler, model: Path) -> None:
    """A seed, ends, log-probs, and greedy tokens that are those of transformers."""
    first, again, other = (sample(sampler, texts(PROMPTS), PARAMS, seed) for seed in (5, 5, 6))
    assert plain(first) == plain(again) != plain(other)
    assert plain([first[0]]) != plain([first[-1]]), "the same prompt has the same seed twice"
    assert len({tuple(item.ids.tolist()) for item in first[0]}) > 1, "a group's completions are all the same"
    assert distance(model, first, 0.7) < TOLERANCE
    tokenizer = load_tokenizer(str(model))
    reference = HFSampler(load_model(str(model), revision=None, device="cpu", dtype="float32"), tokenizer)
    greedy = SamplingParams(2, 24, temperature=0)
    expected = sample(reference, texts(PROMPTS), greedy, 0)
    sampled = sample(sampler, texts(PROMPTS), greedy, 0)
    assert [[item.ids.tolist() for item in group] for group in sampled] == [
        [item.ids.tolist() for item in group] for group in expected
    ]
    check_ends(sampler, tokenizer)
    check_many(sampler)
    check_running(sampler, model, expected)


def check_many(sampler: Sampler) -> None:
    """More tokens of prompts than vLLM reads in one step."""
    prompts = [[*range(5 + number, 99), *range(5, 99)] for number in range(60)]
    groups = sample(sampler, texts(prompts), SamplingParams(2, 3, temperature=1.0), 1)
    assert [len(group) for group in groups] == [2] * len(prompts)


def check_running(sampler: Sampler, model: Path, expected: Sequence[Sequence[Completion]]) -> None:
    """Rows join and leave at any time; what is left is aborted. expected: greedy completions of up to 24 tokens."""
    ended: dict[int, Completion] = {}
    with sampler.running_batch(SamplingParams(1, 1, temperature=0), 0) as batch:
        assert (len(batch), batch.advance()) == (0, [])
        for row, prompt in enumerate(texts(PROMPTS)):
            batch.add([2 * row, 2 * row + 1], prompt, 24)
            ended |= dict(batch.advance())
        while len(batch):
            ended |= dict(batch.advance())
    assert [ended[row].ids.tolist() for row in range(10)] == [item.ids.tolist() for group in expected for item in group]
    turns = running_turns(sampler, 5)
    assert plain([turns]) == plain([running_turns(sampler, 5)]) != plain([running_turns(sampler, 6)])
    assert len({tuple(item.ids.tolist()) for item in turns}) > 1
    with sampler.running_batch(PARAMS, 5) as batch:
        batch.add([0, 1], texts(PROMPTS)[0], 24)
        batch.advance()
    assert distance(model, sample(sampler, texts(PROMPTS), PARAMS, 5), 0.7) < TOLERANCE


def running_turns(sampler: Sampler, seed: int) -> list[Completion]:
    """Two turns of the same prompt for each of three rows."""
    turns: dict[tuple[int, int], Completion] = {}
    with sampler.running_batch(PARAMS, seed) as batch:
        for turn in range(2):
            batch.add([0, 1, 2], texts(PROMPTS)[0], 12)
            while len(batch):
                turns |= {(row, turn): completion for row, completion in batch.advance()}
    return [turns[key] for key in sorted(turns)]


def check_ends(sampler: Sampler, tokenizer: PreTrainedTokenizerBase) -> None:
    stops = ("a", "4", "</answer>")
    params = SamplingParams(32, 24, temperature=1.5, stop=stops)
    completions = [completion for group in sample(sampler, texts(PROMPTS), params, 1) for completion in group]
    for item in completions:
        text = str(tokenizer.decode(item.ids.tolist()))
        before = str(tokenizer.decode(item.ids[:-1].tolist()))
        stopped = any(stop in text for stop in stops)
        assert item.eos == (item.ids[-1] == EOS) and EOS not in item.ids[:-1]
        assert item.finished == (item.eos or stopped), text
        assert item.finished or len(item.ids) == 24
        assert not any(stop in before for stop in stops), "it went on behind a stop text"
    assert {(item.finished, item.eos) for item in completions} == {
        (True, True),
        (True, False),
        (False, False),
    }


def update_distances(sampler: Sampler, directory: Path, *, tied: bool) -> list[float]:
    """Loads UPDATES models, samples from each, and scores a group: the distances of the log-probs."""
    distances = []
    for seed in range(1, UPDATES + 1):
        model = save_tiny(directory / str(seed), tied=tied, seed=seed)
        sampler.load(model)
        groups = sample(sampler, texts(PROMPTS), PARAMS, seed)
        distances.append(max(distance(model, groups, 0.7), scoring_distance(model, sampler, PROMPTS[2], groups[2])))
    return distances


def check_adapters(sampler: Sampler, base: Path, directory: Path) -> None:
    """Each version samples what its merged copy does, also after others, and when its directory is gone."""
    outputs = {}
    for seed in (1, 2, 3):
        adapter, merged = save_adapted(base, directory, seed=seed)
        sampler.load(adapter)
        shutil.rmtree(adapter)
        groups = sample(sampler, texts(PROMPTS), PARAMS, 5)
        assert distance(merged, groups, 0.7) < MERGED_TOLERANCE
        assert scoring_distance(merged, sampler, PROMPTS[2], groups[2]) < MERGED_TOLERANCE
        assert distance(base, groups, 0.7) > 0.1
        outputs[seed] = plain(groups)
    assert outputs[1] != outputs[2] != outputs[3]
    again, _ = save_adapted(base, directory / "again", seed=1)
    sampler.load(again)
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == outputs[1]
