"""The sandbox process: it runs rewards that may hang or crash, and its parent kills it when one hangs.

Rewards and samples come as pickles from the parent, over a socket that no other process has. Answers are JSON.
"""

import errno
import pickle
import traceback
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

from policy_trainer.processes.user_code import serve_parent
from policy_trainer.rewards.functions import RewardFunction, load_function
from shared.errors import UserError

_REWARDS: dict[str, RewardFunction] = {}


def load(pickled: str) -> Mapping[str, Any]:
    """Prepares the rewards. Answers with those that judge many completions together, or why one cannot be used."""
    try:
        rewards, preparations = pickle.loads(b64decode(pickled))
        for prepare in preparations:
            prepare()
        for name, reward in rewards.items():
            loaded = load_function(reward) if isinstance(reward, str) else RewardFunction(name, reward, "sample")
            _REWARDS[name] = loaded
    except UserError as error:
        return {"refused": error.args}
    except BaseException as error:  # a module may also raise SystemExit
        reason = f"rewards: one of them cannot be loaded:\n{traceback.format_exc()}"
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            reason = "judging.memory_gib: too little to load the rewards: give more, or 0 for no limit"
        return {"refused": [reason]}
    return {"together": [name for name, reward in _REWARDS.items() if reward.judges_together]}


def judge(reward: str, pickled: str) -> Iterator[Mapping[str, Any]]:
    """Answers to each call of the reward: one for each of the samples that the call takes."""
    function = _REWARDS[reward]
    for call in function.split(pickle.loads(b64decode(pickled))):
        yield {"answers": function.answers(call)}


if __name__ == "__main__":
    serve_parent(load=load, judge=judge)
