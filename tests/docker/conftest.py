"""Images, built once, and projects, removed after use. All of it needs a Docker engine and `make docker-test`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shared.batch import Batch
from tests.docker.compose import Project, docker, engine_answers
from tests.harness.batches import make_batch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))  # the first build downloads half a gigabyte
            if "DOCKER_TEST" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="make docker-test runs it, with a Docker engine"))


@pytest.fixture(scope="session")
def image() -> None:
    """The image that the services run, built from the working tree."""
    if not engine_answers():
        pytest.exit("no Docker engine answers: start one, or set DOCKER_HOST to it", returncode=1)
    Project().compose("build", "ref-server")


@pytest.fixture(scope="session")
def debian_image(image: None) -> Callable[[str], str]:
    """Builds Debian's PostgreSQL or Prometheus, laid out like the official image, which some machines cannot pull."""

    def build(name: str) -> str:
        base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
        network, tag = os.environ.get("BUILD_NETWORK", "default"), f"tandem-test-{name}"
        directory = str(Path(__file__).parent / name)
        docker("build", "--network", network, "--build-arg", f"BASE_IMAGE={base}", "--tag", tag, directory)
        return tag

    return build


@contextmanager
def _projects() -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def make(**variables: str) -> Project:
        made.append(Project(**variables))
        return made[-1]

    try:
        yield make
    finally:
        for project in made:
            project.remove()


@pytest.fixture
def project(image: None) -> Iterator[Callable[..., Project]]:
    """Makes projects from their variables; removes them after the test."""
    with _projects() as make:
        yield make


@pytest.fixture(scope="module")
def server(image: None) -> Iterator[Project]:
    """`docker compose up` without any variable, shared by the tests of a module that do not change it."""
    with _projects() as make:
        yield make().up()


@pytest.fixture(scope="session")
def rollout() -> Callable[[], Batch]:
    """A batch of random tokens that the demo's model knows."""
    generator = np.random.default_rng(0)

    def make() -> Batch:
        unfinished = np.array([True, True, False])
        return make_batch(generator, 9, (4, 1, 7), run="by-hand", temperature=0.7, finished=unfinished)

    return make
