"""How a server process ends: in order on a signal, with an error when it cannot go on, without losing a batch."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import BatchSummary, State
from shared.batch import Batch
from tests.harness.processes import until
from tests.harness.server import Server
from tests.ref_server import odd_server
from tests.ref_server.calls import Rollout, upload
from tests.ref_server.odd_server import POISON
from tests.ref_server.queue.backends import make_limits

pytestmark = pytest.mark.slow
DIRECT = {"prompt_ids": [1], "completions": [[2]]}


class OddServer(Server):
    """A server process with a fault: an `oddity` of `odd_server`."""

    def __init__(self, folder: Path, model_dir: Path, oddity: str, *options: str) -> None:
        self.folder = folder
        super().__init__(
            model_dir, folder, *options, program=(odd_server.__name__, oddity), variables={"ODD_FOLDER": str(folder)}
        )
        self._before = len(self.output())  # of earlier servers in the same folder

    def end(self) -> tuple[int, str]:
        """Exit status and output, once it has ended by itself."""
        return self.wait(), self.output()[self._before :]

    def upload(self, batch: Batch) -> httpx.Response:
        return upload(self.http, batch)

    def lease(self, seconds: float = 20) -> httpx.Response:
        return self.http.post("/v1/batches/lease", json={"consumer": "c", "wait_seconds": seconds, "lease_seconds": 60})

    def hold(self) -> None:
        (self.folder / "begun").unlink(missing_ok=True)
        (self.folder / "hold").touch()

    def stored(self) -> dict[str, BatchSummary]:
        """What the next server finds, once this one has ended."""
        with closing(SqliteQueue(self.data / "queue.sqlite", limits=make_limits())) as queue:
            return {info.id: info for info in queue.list(None, None, 1000, None).batches}


Launch = Callable[..., OddServer]


@pytest.fixture
def launch(tmp_path: Path, model_dir: Path) -> Iterator[Launch]:
    """Starts a server on the test's own folder."""
    started: list[OddServer] = []

    def begin(oddity: str, *options: str) -> OddServer:
        started.append(OddServer(tmp_path, model_dir, oddity, *options))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


@pytest.fixture
def start(launch: Launch) -> Launch:
    """Starts a server on the test's own folder, and waits until it is ready."""

    def begin(oddity: str, *options: str) -> OddServer:
        return launch(oddity, *options).until_ready()

    return begin


def begin_a_forward(server: OddServer, batch: Batch) -> None:
    server.hold()
    assert server.upload(batch).status_code == 201
    until((server.folder / "begun").exists)


def test_a_signal_lets_the_server_finish_its_work(start: Launch, rollout: Rollout) -> None:
    server = start("hold")
    leased, in_hand = rollout(), rollout()
    assert server.upload(leased).status_code == 201
    key = {"id": leased.id, "token": server.lease().headers["Lease-Token"]}
    begin_a_forward(server, in_hand)
    acknowledged: list[str] = []
    refused = threading.Event()

    def stream() -> None:
        while (answer := server.upload(batch := rollout())).status_code == 201:
            acknowledged.append(batch.id)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.headers["Retry-After"] == "1"
        refused.set()

    with ThreadPoolExecutor() as pool:
        poll, direct = pool.submit(server.lease), pool.submit(server.http.post, "/v1/logprobs", json=DIRECT)
        streams = [pool.submit(stream) for _ in range(3)]
        until(lambda: len(acknowledged) > 20)
        server.popen.terminate()
        for each in streams:
            each.result()
        assert poll.result().status_code == 503
        assert server.lease(0).status_code == 503
        assert server.http.post("/v1/logprobs", json=DIRECT).status_code == 503
        unready = server.http.get("/readyz")
        assert (unready.status_code, unready.json()["error"]["message"]) == (503, "the server is shutting down")
        settled = server.http.post("/v1/leases/ack", json={"leases": [key]}).json()["results"]
        assert [result["outcome"] for result in settled] == ["ok"]
        assert not direct.done()
        (server.folder / "hold").unlink()
        assert direct.result().status_code == 200
    status, output = server.end()
    assert status == 0, output
    assert "Traceback" not in output
    assert not (server.data / "queue.sqlite-wal").exists(), "the log is in the file, and the file is closed"
    left = server.stored()
    assert left[leased.id].state == State.DONE
    assert left[in_hand.id].state == State.READY
    assert {left[id].state for id in acknowledged} == {State.QUEUED}
    assert all(info.scoring_attempts == 0 for info in left.values())


def test_a_forward_that_takes_too_long_is_left_to_the_next_start(start: Launch, rollout: Rollout) -> None:
    server = start("hold", "--drain-seconds", "1")
    batch, waiting = rollout(), rollout()
    begin_a_forward(server, batch)
    assert server.upload(waiting).status_code == 201
    server.popen.terminate()
    status, output = server.end()
    assert status == 1
    assert "could not be finished in time" in output
    assert {id: info.state for id, info in server.stored().items()} == {batch.id: "queued", waiting.id: "queued"}


def test_a_second_signal_ends_it_at_once(start: Launch, rollout: Rollout) -> None:
    server = start("hold")
    batch = rollout()
    begin_a_forward(server, batch)
    server.popen.terminate()
    until(lambda: not server.ready())
    server.popen.terminate()
    assert server.end()[0] == 128 + signal.SIGTERM
    assert server.stored()[batch.id].state == State.QUEUED


def test_ctrl_c_ends_it_in_order(start: Launch, rollout: Rollout) -> None:
    server = start("hold")
    batch = rollout()
    begin_a_forward(server, batch)
    server.popen.send_signal(signal.SIGINT)
    until(lambda: not server.ready())
    (server.folder / "hold").unlink()
    status, output = server.end()
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert not (server.data / "queue.sqlite-wal").exists()
    assert server.stored()[batch.id].state == State.READY


def test_a_start_that_takes_long_can_be_ended(launch: Launch) -> None:
    server = launch("endless-loading")
    until(lambda: "loading\n" in server.output(), "it to load its model", server)
    server.popen.terminate()
    assert server.end()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        ("lost-device", "device-side assert triggered"),
        ("end-of-thread", "SystemExit"),
        ("broken-claims", "TypeError: a bug of the queue"),
    ],
)
def test_a_server_that_can_no_longer_score_ends_with_an_error(
    start: Launch, rollout: Rollout, oddity: str, message: str
) -> None:
    server = start(oddity)
    batch = rollout()
    batch.group.prompt_ids[0] = POISON
    assert server.upload(batch).status_code == 201
    status, output = server.end()
    assert status == 1
    assert "the scoring loop has ended with an error" in output
    assert "Traceback" in output
    assert message in output
    left = server.stored()[batch.id]
    assert (left.state, left.scoring_attempts) == (State.QUEUED, 0)


def test_a_batch_that_loses_the_device_becomes_dead_and_no_other(
    launch: Launch, start: Launch, rollout: Rollout
) -> None:
    poisonous, others = rollout(), [rollout() for _ in range(4)]
    poisonous.group.prompt_ids[0] = POISON
    for batch in others:
        batch.group.prompt_ids[0] = 1
    server = start("hold")
    begin_a_forward(server, others[0])
    for batch in (poisonous, *others[1:]):
        assert server.upload(batch).status_code == 201
    server.kill()
    (server.folder / "hold").unlink()
    for _ in range(2):
        assert launch("lost-device", "--queue.max-deliveries", "2").end()[0] == 1
    server = start("lost-device", "--queue.max-deliveries", "2")
    ids = {server.lease().headers["Batch-Id"] for _ in others}
    assert ids == {batch.id for batch in others}
    dead = server.http.get(f"/v1/batches/{poisonous.id}").json()
    assert (dead["state"], dead["reason"]) == ("dead", "the server ended while scoring it, 2 times")
