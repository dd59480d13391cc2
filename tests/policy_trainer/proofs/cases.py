"""Random completions, as the proofs want them: ragged, some masked (as by tools), not judged, cut off or empty."""

import math
import random
from dataclasses import replace

from tests.policy_trainer.proofs.oracle import Completion

# Sums of few of them are exact, so that groups of equal rewards have exactly no variance on every side.
REWARDS = (0.0, 0.25, 1.0, 2.0)
# Of several rewards of a completion, by name.
WEIGHTS = {"first": 1.0, "second": 0.5, "third": -0.25}


def random_groups(
    rng: random.Random,
    *,
    count: int = 3,
    size: int | None = None,
    unrewarded: float = 0.0,
    unfinished: float = 0.0,
    noise: float = 0.4,
) -> list[list[Completion]]:
    """Groups of `size` completions, or of random sizes. unrewarded, unfinished: the probability that a reward is NaN,
    and that a completion is cut off."""
    return [
        [random_completion(rng, unrewarded, unfinished, noise) for _ in range(size or rng.randint(1, 5))]
        for _ in range(count)
    ]


def random_completion(rng: random.Random, unrewarded: float, unfinished: float, noise: float) -> Completion:
    length = rng.randint(1, 6)
    logps = [rng.uniform(-4, -0.5) for _ in range(length)]
    trained = rng.choice((1.0, 0.7, 0.7, 0.0)) if rng.random() < 0.5 else 1.0
    parts = [(weight, math.nan if rng.random() < 0.1 else rng.choice(REWARDS)) for weight in WEIGHTS.values()]
    ends = sorted(rng.sample(range(length), rng.randint(0, min(3, length))))
    return Completion(
        reward=float("nan") if rng.random() < unrewarded else rng.choice(REWARDS),
        logps=logps,
        old=[logp + rng.gauss(0, noise) for logp in logps],
        sampler=[logp + rng.gauss(0, noise) for logp in logps],
        reference=[logp + rng.gauss(0, noise) for logp in logps],
        mask=mask_of_turns(rng, length) if rng.random() < 0.3 else [rng.random() < trained for _ in range(length)],
        entropies=[rng.uniform(0, 4) for _ in range(length)],
        finished=rng.random() >= unfinished,
        steps=[(rng.choice(REWARDS), end) for end in ends],
        staleness=rng.randint(0, 4),
        parts=parts,
        teacher=[logp + rng.gauss(0, noise) for logp in logps],
        norms=[rng.uniform(0, 2) for _ in logps],
    )


def mask_of_turns(rng: random.Random, length: int) -> list[bool]:
    """As tools leave it: false from the end of a turn to the begin of the next one, and in some nearly everywhere."""
    if length < 3:
        return [True] * length
    if rng.random() < 0.3:
        trained = rng.randrange(length)
        return [t == trained for t in range(length)]
    cuts = sorted(rng.sample(range(1, length), 2 * rng.randint(1, (length - 1) // 2)))
    return [sum(cut <= t for cut in cuts) % 2 == 0 for t in range(length)]


def without_tokens(completion: Completion) -> Completion:
    return replace(completion, mask=[False] * len(completion.mask))
