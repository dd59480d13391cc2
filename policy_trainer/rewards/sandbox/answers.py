"""What a process that runs users' rewards answers for each sample: a score, an error, or a refusal."""

from collections.abc import Callable, Sequence
from traceback import StackSummary, TracebackException
from typing import Any

from policy_trainer.data.sample import Reward, Sample, Score
from policy_trainer.data.user_code import their_frames
from policy_trainer.rewards.signatures import Concurrent, ManyAtOnce, OwnReward
from shared.errors import UserError

# Rewards that take many samples in one call.
TOGETHER = (Concurrent, ManyAtOnce)
# Only the end of a traceback is sent: it names the error.
_MAX_CHARACTERS = 4000


def shares(reward: Reward | OwnReward, samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each judgement: of all at once, or of one."""
    return [list(samples)] if isinstance(reward, TOGETHER) else [[sample] for sample in samples]


def answers(
    reward: Reward | OwnReward, samples: list[Sample], note: Callable[[BaseException], object] = lambda error: None
) -> list[dict[str, Any]]:
    """An answer for each sample of one judgement: `score`, or `error` with its `kind`, or `refused` with the reason.

    note: called with each exception.
    """
    try:
        outcomes = reward.outcomes(samples) if isinstance(reward, TOGETHER) else [reward(*samples)]
    except BaseException as error:  # a user's reward may raise anything, SystemExit too
        # Not kept in a variable: its traceback holds this frame, and in a circle the reward's memory would stay taken.
        return [_answer(reward, error, note)] * len(samples)
    return [_answer(reward, outcome, note) for outcome in outcomes]


def _answer(
    reward: Reward | OwnReward, outcome: Score | BaseException, note: Callable[[BaseException], object]
) -> dict[str, Any]:
    if isinstance(outcome, UserError):
        return {"refused": str(outcome)}
    if not isinstance(outcome, BaseException):
        return {"score": outcome if outcome is None else float(outcome)}
    note(outcome)
    told = own_frames(outcome) if isinstance(reward, OwnReward) else TracebackException.from_exception(outcome)
    place = [f"{frame.filename}:{frame.lineno}" for frame in told.stack[-1:]]
    lines = "".join(told.format())
    return {"error": lines[-_MAX_CHARACTERS:], "kind": " at ".join([type(outcome).__name__, *place])}


def own_frames(error: BaseException) -> TracebackException:
    """The traceback without the frames of this program, which called the user's function."""
    told = TracebackException.from_exception(error)
    part: TracebackException | None = told
    while part is not None:
        part.stack = StackSummary.from_list(their_frames(part.stack))
        part = part.__cause__ or part.__context__
    return told


def refusal(answered: Sequence[dict[str, Any]]) -> str | None:
    """Why a reward cannot be used, if an answer says so."""
    return next((answer["refused"] for answer in answered if "refused" in answer), None)
