"""The reference that a queue wants: restarted and other servers load it, or report that they cannot."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring import frozen_model
from ref_server.service.service import Service
from shared.models import save_model
from tests.harness.processes import until
from tests.ref_server.calls import Rollout, Serve, admit, lease
from tests.ref_server.queue.backends import postgres_backend
from tests.ref_server.scoring.changed_models import changed_model
from tests.ref_server.scoring.queued import lease_scored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of one architecture, and a snapshot."""
    save_model(make_model(0), make_tokenizer(), tmp_path / "model")
    save_model(changed_model(0.01), make_tokenizer(), tmp_path / "other-model")
    save_model(changed_model(0.02), make_tokenizer(), tmp_path / "snapshots" / "one")
    return tmp_path


@pytest.fixture
def start(folder: Path, serve: Serve) -> Callable[..., AbstractContextManager[httpx.Client]]:
    """Serves what is in the folder, as the command does."""

    def start(model: str = "model", **settings: Any) -> AbstractContextManager[httpx.Client]:
        given = {"data_dir": folder / "data", "snapshot_root": folder / "snapshots", **settings}
        config = ServeConfig(model=str(folder / model), **given)
        return serve(Service(frozen_model.load(config), open_queue(config), config))

    return start


def put(http: httpx.Client, snapshot: str | None, version: int) -> httpx.Response:
    return http.put("/v1/reference", json={"snapshot": snapshot, "version": version})


def served(http: httpx.Client) -> tuple[str | None, int]:
    info = http.get("/v1/model").json()
    return info["snapshot"], info["reference_version"]


def unready(http: httpx.Client) -> str:
    answer = http.get("/readyz")
    return answer.json()["error"]["message"] if answer.status_code == 503 else ""


def test_a_restarted_server_has_it_again(start: Any, rollout: Rollout) -> None:
    with start() as http:
        assert put(http, "one", 3).status_code == 200
    with start() as http:
        assert served(http) == ("one", 3)
        admit(http, rollout())
        assert lease_scored(http).reference_version == "3"
        assert put(http, None, 4).status_code == 200
        assert served(http) == (None, 4)
    with start() as http:
        assert served(http) == (None, 4)


def test_a_server_that_cannot_have_it_scores_nothing_and_says_so(
    folder: Path, start: Any, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.service.reference.LOOK_SECONDS", 0.02)
    monkeypatch.setattr("ref_server.service.reference.RETRY_SECONDS", 0.02)
    with start() as http:
        assert put(http, "one", 3).status_code == 200
    (folder / "snapshots" / "one").rename(folder / "snapshots" / "away")
    with start() as http:
        assert "cannot have the reference that its queue wants, one, version 3: there is no snapshot" in unready(http)
        admit(http, rollout())
        assert lease(http, wait_seconds=1).status_code == 204
        metrics = http.get("/metrics").text
        assert "tandem_reference_version 0.0" in metrics
        assert "tandem_reference_wanted_version 3.0" in metrics
        assert "tandem_ready 0.0" in metrics
        info = http.get("/v1/model").json()
        assert (info["snapshot"], info["reference_version"], info["wanted_version"]) == (None, 0, 3)
        (folder / "snapshots" / "away").rename(folder / "snapshots" / "one")
        assert lease_scored(http).reference_version == "3"
        until(lambda: unready(http) == "")


def test_it_is_not_taken_by_a_server_of_another_model(start: Any, rollout: Rollout) -> None:
    """It would be taken for that model's own: the architecture is the same."""
    with start() as http:
        assert put(http, "one", 3).status_code == 200
    with start("other-model") as http:
        assert "replaced the weights of another --model" in unready(http)
        assert put(http, None, 4).status_code == 200
        assert unready(http) == ""
        admit(http, rollout())
        assert lease_scored(http).reference_version == "4"
    with start("model") as http:
        assert "replaced the weights of another --model" in unready(http)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    with postgres_backend(tmp_path) as backend:
        yield backend.url


@pytest.mark.slow
def test_servers_of_one_queue_follow(start: Any, rollout: Rollout, database: str) -> None:
    with ExitStack() as opened:
        first, second = (opened.enter_context(start(store=database)) for _ in range(2))
        assert put(first, "one", 3).status_code == 200
        until(lambda: served(second) == ("one", 3))
        assert unready(second) == ""
        assert put(second, "one", 2).json()["error"]["code"] == "older_version"
        assert put(second, None, 4).status_code == 200
        until(lambda: served(first) == (None, 4))
        for _ in range(4):
            admit(first, rollout())
        assert {lease_scored(second).reference_version for _ in range(4)} == {"4"}
    with start(store=database) as late:
        assert served(late) == (None, 4)


@pytest.mark.slow
def test_a_server_behind_leaves_the_batches_to_those_that_have_it(
    folder: Path, start: Any, rollout: Rollout, database: str
) -> None:
    with start(store=database) as first, start(store=database, snapshot_root=folder / "elsewhere") as blind:
        assert put(first, "one", 3).status_code == 200
        for _ in range(8):
            admit(blind, rollout())
        assert {lease_scored(blind).reference_version for _ in range(8)} == {"3"}
        until(lambda: "there is no snapshot" in unready(blind))
