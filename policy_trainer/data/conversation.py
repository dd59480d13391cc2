"""A rollout of several turns: what was said, which tools were called, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from policy_trainer.data.problem import EnvironmentReference, Problem

# How a rollout ends. finished: by a turn without calls. truncated: at sampling.max_completion_length, or where the
# answers of tools would exceed it. out_of_turns, out_of_time: at turns.max_tool_calling_iterations,
# turns.rollout_seconds. no_bridge: the tokens that follow its last turn are not known.
End = Literal["finished", "truncated", "out_of_turns", "out_of_time", "no_bridge"]


@dataclass(frozen=True)
class CallRecord:
    """A call of a tool. error: the kind of its failure, empty if it went well. log: the end of what it printed."""

    name: str
    seconds: float
    error: str = ""
    log: str = ""


@dataclass(frozen=True, eq=False)
class Conversation:
    """What a rollout has besides its tokens.

    mask: bool (T,), true for the tokens that the model sampled, false for those between its turns and, if the prompts
    of the group differ, for the end of its prompt. problem: its own problem in such a group, else None. messages: the
    assistant's and the tools', as TRL's rewards get them. calls: those after each of the model's turns. seconds: from
    the first prompt to the end. environment: which lives until rewards have judged, unless it is lost; None without
    any. reward, step_rewards: the environment's, of the rollout and after each turn; NaN where it failed.
    """

    mask: np.ndarray
    messages: tuple[Mapping[str, Any], ...]
    calls: tuple[tuple[CallRecord, ...], ...]
    end: End
    seconds: float
    environment: EnvironmentReference | None = None
    environment_lost: bool = False
    reward: float | None = None
    step_rewards: tuple[float, ...] = ()
    problem: Problem | None = None

    @property
    def first_turn(self) -> int:
        """Index of the first token that the model sampled."""
        return int(self.mask.argmax())

    @property
    def last_turn(self) -> int:
        """Index of the first token of the model's last turn."""
        between = np.flatnonzero(~self.mask)
        return int(between[-1]) + 1 if len(between) else 0

    @property
    def turn_ends(self) -> np.ndarray:
        """int64 (K,): indexes of the last token of each of the model's turns."""
        return np.flatnonzero(self.mask & ~np.append(self.mask[1:], False))
