"""The division of a limit among the runs of one token."""

from ref_server.queue.limits import RunShare


def share(held: list[int], run: int) -> RunShare:
    return RunShare(f"{run}", held[run], sum(held), sum(held), "batches", "wait")


def test_no_run_of_a_token_starves() -> None:
    """Each run uploads until it is refused, the first ones first; trainers take one of each."""
    held, most = [0] * 5, 160
    for _ in range(200):
        held = [max(0, batches - 1) for batches in held]
        for run in range(5):
            assert share(held, run).room(most, most // 2) > 0 or share(held, run).refusal(1, most, "max", most // 2)
            while not share(held, run).refusal(1, most, "max", most // 2):
                held[run] += 1
            assert share(held, run).room(most, most // 2) == 0
    assert min(held) > most // 20
    assert sum(held) <= most * 3 // 4
