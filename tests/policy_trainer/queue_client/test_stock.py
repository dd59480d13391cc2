"""What waits for training, and how many more are to be leased."""

import threading
from typing import Any

import pytest

from policy_trainer.queue_client.stock import Stock


@pytest.fixture
def stock() -> Stock:
    return Stock(ahead=2)


def named(*names: str) -> Any:
    """What waits is only passed on."""
    return names


def test_a_few_are_leased_ahead(stock: Stock) -> None:
    assert stock.lacking(0) == 2 and not stock.full
    stock.add(named("a"))
    assert stock.lacking(0) == 1
    stock.add(named("b"))
    assert stock.lacking(0) == 0 and stock.full


def test_a_step_lacks_what_it_needs_and_the_few(stock: Stock) -> None:
    assert stock.take(5, timeout=0) is None
    assert stock.lacking(0) == 7
    stock.add(named(*"abcdefg"))
    assert stock.full
    assert [stock.take(needed, timeout=0) for needed in (5, 4, 3, 2, 1)] == list("abcde")
    assert stock.full, "two wait for the next step"


def test_what_was_put_back_is_the_next_in_its_order(stock: Stock) -> None:
    stock.add(named("a", "b", "c"))
    taken: list[Any] = [stock.take(1, timeout=0), stock.take(1, timeout=0)]
    stock.put_back(taken)
    assert [stock.take(1, timeout=0) for _ in range(3)] == ["a", "b", "c"]


def test_what_was_taken_in_vain_is_lacking_again(stock: Stock) -> None:
    stock.add(named("bad", "good"))
    assert [stock.take(1, timeout=0), stock.take(1, timeout=0)] == ["bad", "good"]
    assert stock.lacking(0) == 2


def test_a_taker_waits_for_what_comes_and_a_lessor_for_room(stock: Stock) -> None:
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.append(stock.take(1, timeout=60)))
    taker.start()
    while stock.lacking(60) < 3:
        pass  # until it needs one
    stock.add(named("a", "b", "c"))
    taker.join(60)
    assert taken == ["a"]
    room: list[int] = []
    lessor = threading.Thread(target=lambda: room.append(stock.lacking(60)))
    lessor.start()
    stock.take(3, timeout=0)
    lessor.join(60)
    assert room and room[0] >= 3
