"""Penalties: rewards of 0 or less that do not depend on the gold answer."""

from policy_trainer.data.sample import Reward, Sample


def length_penalty(tokens: int) -> Reward:
    """Falls linearly from 0 to -1 at `tokens` tokens, and stays at -1 beyond."""
    return lambda sample: -min(1.0, sample.tokens / tokens)


def repetition_penalty(ngram: int, most: float) -> Reward:
    """-most times the share of word n-grams that are repetitions (arXiv 2502.03373, C.2); 0 below `ngram` words."""

    def penalty(sample: Sample) -> float:
        words = sample.sampled.lower().split()
        total = len(words) - ngram + 1
        if total < 1:
            return 0.0
        different = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
        return -most * (1 - different / total)

    return penalty


def soft_overlong_penalty(longest: int, margin: int) -> Reward:
    """0 up to longest - margin tokens, then falls linearly to -1 at `longest` (DAPO, arXiv 2503.14476, eq. 13)."""
    return lambda sample: -min(1.0, max(0.0, (sample.tokens - (longest - margin)) / margin))
