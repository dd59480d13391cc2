"""Queues as a server would report them."""

from shared.api import Depth, LimitsView, QueueView, ScoringView, State


def queue_of(leased: int = 0, leased_by_others: int = 0, ready: int = 2, **numbers: int) -> QueueView:
    """A queue in which run `ours` has so many batches ready and leased. numbers: of other states, or limits."""
    counts = {State.READY: ready, State.LEASED: leased}
    counts |= {state: numbers.pop(state) for state in State if state in numbers}
    states = {state: Depth(batches=0, bytes=0) for state in State}
    return QueueView(
        states={**states, State.LEASED: Depth(batches=leased + leased_by_others, bytes=1)},
        runs={"ours": {state: Depth(batches=count, bytes=10 * count) for state, count in counts.items()}},
        stored_bytes=0,
        oldest_age_seconds=None,
        since_start={},
        scoring=ScoringView.model_validate(dict.fromkeys(ScoringView.model_fields, 0)),
        limits=LimitsView.model_validate(
            dict.fromkeys(LimitsView.model_fields, 100) | {"max_stored_bytes": 10_000} | numbers
        ),
    )
