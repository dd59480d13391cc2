"""How many groups workers may sample: what a publication says of it."""

from policy_trainer.config import TrainConfig
from policy_trainer.queue_client.feed import LeaseFeed
from policy_trainer.queue_client.server import QueueWatch

# By default workers pause when the groups of this many steps wait for training.
_WAITING_STEPS = 3


def max_waiting(config: TrainConfig) -> int:
    """How many groups may wait for training: by default at most max_lag + 1 steps of them, since more would expire."""
    steps = _WAITING_STEPS if config.max_lag is None else min(_WAITING_STEPS, config.max_lag + 1)
    return config.max_waiting or steps * config.groups_per_step


class Demand:
    """How many groups workers sample with the published weights.

    With max_lag = 0 they sample those of one step and wait for the next weights, so a group that is lost has to be
    asked for. Else they sample all the time, and there is nothing to ask for.
    """

    def __init__(self, config: TrainConfig, watch: QueueWatch, feed: LeaseFeed) -> None:
        self.max_waiting = max_waiting(config)
        self._of_a_step = config.groups_per_step if config.max_lag == 0 else None
        self._watch = watch
        self._feed = feed
        self._version = -1
        self._bad = self._gone = self._asked_again = 0
        self._dead: int | None = None  # before this version; None until the server has said it

    def groups(self, version: int) -> int | None:
        """All groups to sample with the weights of this version; None: as many as may wait."""
        if version != self._version:
            self._version, self._dead, self._gone = version, self._watch.depth["dead"], self._feed.gone
            self._bad = self._asked_again = 0
        return None if self._of_a_step is None else self._of_a_step + self._asked_again

    def lose(self, groups: int) -> None:
        """So many groups of the newest version cannot be trained on."""
        self._bad += groups

    def grows(self) -> bool:
        """Whether groups were lost for which no others were asked. They are asked for from then on."""
        lost = self._bad + self._newly_dead + self._feed.gone - self._gone
        grows = self._of_a_step is not None and lost > self._asked_again
        self._asked_again = max(lost, self._asked_again)
        return grows

    @property
    def _newly_dead(self) -> int:
        """Groups of this version that the server could not score, or that the trainer refused too often."""
        dead = self._watch.depth["dead"]
        if dead is None:
            return 0
        if self._dead is None:
            self._dead = dead
        return dead - self._dead
