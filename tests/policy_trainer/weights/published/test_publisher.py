"""Publishing in a background thread."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.learner.adapters import save_policy
from policy_trainer.processes.lifecycle.endings import Stopped
from policy_trainer.weights.published.publication import Publication, Save
from policy_trainer.weights.published.publisher import BackgroundPublisher
from shared.models import copy_state


class SlowPlace:
    """Publishes once `go_on` is set."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self.versions: list[int] = []

    def publish(self, save: Save, publication: Publication) -> None:
        self.began.set()
        assert self.go_on.wait(60)
        if self.failure:
            raise self.failure
        self.versions.append(publication.version)

    def has(self, publication: Publication) -> bool:
        return publication.version in self.versions

    def describe(self) -> str:
        raise AssertionError


def go_on() -> None:
    pass


def stop() -> None:
    raise Stopped


def publication(version: int) -> Publication:
    return Publication("test", 0, version, next_index=0, max_waiting=12)


@pytest.fixture
def save(make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> Save:
    model = make_tiny()
    return partial(save_policy, model, tokenizer, state=copy_state(model))


@pytest.fixture
def place() -> Iterator[SlowPlace]:
    made = SlowPlace()
    yield made
    made.go_on.set()


def test_only_the_newest_waiting_version_is_published(place: SlowPlace, save: Save) -> None:
    background = BackgroundPublisher(place)
    background.publish(save, publication(1))
    assert place.began.wait(60)
    for version in (2, 3, 4):
        background.publish(save, publication(version))
    assert not background.lost(), "it is being published"
    place.go_on.set()
    background.wait(go_on)
    assert place.versions == [1, 4] and not background.lost()
    place.versions.clear()
    assert background.lost()


@pytest.mark.parametrize("then", ["publish", "wait", "lost"])
def test_a_failure_is_raised_later(place: SlowPlace, save: Save, then: str) -> None:
    place.failure = OSError("No space left on device")
    place.go_on.set()
    background = BackgroundPublisher(place)
    background.publish(save, publication(1))
    with pytest.raises(OSError, match="No space left"):
        while then == "publish":
            background.publish(save, publication(2))
        while then == "lost":
            assert not background.lost()
        background.wait(go_on)
    background.close()
    assert not place.versions


def test_a_stop_waits_only_for_the_version_being_published(
    place: SlowPlace, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join

    def then_go_on(thread: threading.Thread, timeout: float | None = None) -> None:
        place.go_on.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", then_go_on)
    background = BackgroundPublisher(place)
    background.publish(save, publication(1))
    assert place.began.wait(60)
    background.publish(save, publication(2))
    background.close()
    assert place.versions == [1]


def test_a_stop_does_not_wait_for_a_place_that_hangs(
    place: SlowPlace, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policy_trainer.weights.published.publisher._ENDING_SECONDS", 0.05)
    background = BackgroundPublisher(place)
    background.publish(save, publication(1))
    assert place.began.wait(60)
    with pytest.raises(Stopped):
        background.wait(stop)
    background.close()
    assert place.versions == []
