"""Whether the calls on each batch have an order, consistent with real time, that a sequential model accepts.

Linearizability, after Herlihy and Wing 1990, is decided batch by batch, since a history is linearizable when that of
each object is. The search is Wing and Gong's of 1993, with Lowe's memory of the states that it has been in.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tests.chaos.batch_model import BatchModel, BatchState
from tests.chaos.calls import BatchCalls, Call, by_batch
from tests.chaos.history import Event

S = TypeVar("S")


def violations(events: Iterable[Event], max_deliveries: int) -> dict[str, list[str]]:
    """For each batch whose calls have no order: the longest order that there is, and the calls that do not follow."""
    found = {id: explain(batch, max_deliveries) for id, batch in by_batch(events).items()}
    return {id: lines for id, lines in found.items() if lines}


def explain(batch: BatchCalls, max_deliveries: int) -> list[str]:
    """Nothing if the calls have an order."""
    model = BatchModel(max_deliveries, batch.useless_from, batch.ghosts_from)
    calls = sorted(batch.calls, key=lambda call: call.begin)
    order = longest_order(calls, BatchState(), model.after)
    left = [call for place, call in enumerate(calls) if call.told is not None and place not in order]
    return [*(f"then {calls[place]}" for place in order), *(f"but not {call}" for call in left)] if left else []


def longest_order(calls: Sequence[Call], start: S, after: Callable[[S, Call], Iterable[S]]) -> Sequence[int]:
    """Places of the answered calls and of some others, in an order that real time and the model allow, if there is one.

    Otherwise the beginning of one, as long as it gets. calls: by their begin. after: the states in which a call may
    leave a state, none if it cannot have been told what it was told there.
    """
    answered = sum(1 << place for place, call in enumerate(calls) if call.told is not None)
    seen = {(0, start)}
    stack: list[tuple[int, S, tuple[int, ...]]] = [(0, start, ())]
    longest: tuple[int, ...] = ()
    while stack:
        done, state, order = stack.pop()
        if len(order) > len(longest) or not answered & ~done:
            longest = order
        if not answered & ~done:
            break
        steps = []
        for place in _next(calls, done):
            for changed in after(state, calls[place]):
                useless = changed == state and calls[place].told is None
                if not useless and (node := (done | 1 << place, changed)) not in seen:
                    seen.add(node)
                    steps.append((*node, (*order, place)))
        stack += reversed(steps)  # the earliest first
    return longest


def _next(calls: Sequence[Call], done: int) -> list[int]:
    """The calls that may come next: those that began before each of the others had ended."""
    left = [place for place in range(len(calls)) if not done >> place & 1]
    first_end = min(calls[place].end for place in left)
    return [place for place in left if calls[place].begin <= first_end]
