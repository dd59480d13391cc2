"""What sampling cost beside the groups that came of it."""

from dataclasses import dataclass


@dataclass
class WastedSamples:
    """What did not become a group of a round: prompts that were too long, groups given up because they teach nothing,
    and the completion tokens of these. Batches carry these names, and metrics sum them."""

    dropped_prompts: int = 0
    resampled_groups: int = 0
    resampled_tokens: int = 0
