"""Shares of something limited: half for one holder, and something always free for a newcomer."""

import random
from collections import Counter

import pytest

from ref_server.access.shares import Shares, peer


def fill(shares: Shares, *holders: str) -> Counter[str]:
    """Holders take one after the other until nobody gets more."""
    got: Counter[str] = Counter()
    hungry = set(holders)
    while hungry:
        for holder in sorted(hungry):
            if shares.take(holder):
                got[holder] += 1
            else:
                hungry.remove(holder)
    return got


@pytest.mark.parametrize("holders", [1, 2, 3, 9])
def test_greedy_holders_get_equal_parts_and_leave_as_much(holders: int) -> None:
    got = fill(Shares(1000), *map(str, range(holders)))
    assert set(got.values()) <= {1000 // (holders + 1), 1000 // (holders + 1) + 1}
    assert got.total() <= 1000


def test_a_newcomer_finds_room_next_to_a_greedy_holder() -> None:
    shares = Shares(1000)
    fill(shares, "greedy")
    assert fill(shares, "newcomer") == {"newcomer": 250}
    assert not shares.take("greedy")
    assert not shares.take("large", 200)
    assert shares.take("large", 125)


def test_nothing_is_lost_or_gained() -> None:
    shares, chance = Shares(100), random.Random(0)
    held: list[tuple[str, int]] = []
    for _ in range(5000):
        holder, size = chance.choice("abc"), chance.randrange(40)
        if shares.take(holder, size):
            held.append((holder, size))
        assert sum(size for _, size in held) <= 100
        if held and chance.random() < 0.4:
            shares.give(*held.pop(chance.randrange(len(held))))
    for each in held:
        shares.give(*each)
    assert fill(shares, "single") == {"single": 50}


def test_what_a_piece_of_work_holds_ends_with_it() -> None:
    shares = Shares(10)
    with pytest.raises(KeyError), shares.hold("a") as take:
        assert take(3)
        assert take(2)
        assert not take(1)
        raise KeyError
    with shares.hold("a") as take:
        assert take(5)


@pytest.mark.parametrize(
    ("single", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "", True),
    ],
)
def test_addresses_that_one_peer_can_choose_among_are_one(single: str, other: str, same: bool) -> None:
    assert (peer(single) == peer(other)) is same
