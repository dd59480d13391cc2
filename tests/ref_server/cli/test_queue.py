"""`ref-server queue` against a real server: every verb, for people and for programs, and every refusal."""

import io
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest

from ref_server.cli import queue
from ref_server.cli.queue import views
from ref_server.config import QueueConfig
from ref_server.service.service import Service
from shared import wire
from shared.api import PurgeBody, Purged
from shared.batch import Batch, Training
from shared.client import NotRefServer, RefServerClient
from tests.harness.ports import free_port
from tests.harness.processes import until

Rollout = Callable[..., Batch]
Command = Callable[..., tuple[int, str, str]]

# Batches that may wait in one run.
ROOM = 6
UNKNOWN = "00000000-0000-7000-8000-000000000000"
NUMBERS = count()


@pytest.fixture(scope="module")
def service(make_service: Callable[..., Service]) -> Service:
    """A batch dies of its first failure, and a run is soon full."""
    return make_service(queue=QueueConfig(max_deliveries=1, max_batches_per_run=ROOM))


@pytest.fixture
def run() -> str:
    """A run for this test, so that tests share a server."""
    return f"run-{next(NUMBERS)}"


@pytest.fixture
def command(command: Command, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `ref-server queue` against the server."""
    monkeypatch.setenv("REF_SERVER_URL", str(http.base_url))
    return lambda *arguments: command("queue", *arguments)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    """Gives the command a terminal with this input; returns its output."""

    def sit_down(typed: str) -> Terminal:
        screen = Terminal()
        monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no bar
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return sit_down


def ready(http: httpx.Client, batch: Batch) -> str:
    """Uploads a batch and waits until it is scored: its id."""
    body = wire.encode(batch)
    assert http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE}).status_code == 201
    lease(http, batch.run, error=None)
    return batch.id


def dead(http: httpx.Client, batch: Batch, error: str = "the loss is not finite") -> str:
    """Uploads a batch and lets it die: its id. No other batch of its run may be ready."""
    ready(http, batch)
    lease(http, batch.run, error=error)
    assert state(http, batch.id) == "dead"
    return batch.id


def lease(http: httpx.Client, run: str, error: str | None) -> None:
    """Leases a batch and gives it back."""
    leased = http.post("/v1/batches/lease", json={"consumer": "trainer", "run": run, "wait_seconds": 15})
    key = {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}
    http.post("/v1/leases/release", json={"leases": [key], "error": error}).raise_for_status()


def state(http: httpx.Client, id: str) -> str:
    return http.get(f"/v1/batches/{id}").json()["state"]


# Looking


def test_stats(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    dead(http, rollout(run=run))
    ready(http, rollout(run=run))
    status, out, err = command("stats")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines() if line.startswith(run)] == [
        [run, "ready", "1", "<0.1"],
        [run, "dead", "1", "<0.1"],
    ]
    assert [f"batches, {run}", "1", str(ROOM), "16.7"] in [line.split("  ") for line in squeezed(out)]
    assert "the oldest waiting batch has waited" in out
    assert "tokens/s" in out
    status, out, _ = command("stats", "--json")
    printed, answer = json.loads(out), http.get("/v1/queue").json()
    assert (status, printed["runs"][run], printed["limits"]) == (0, answer["runs"][run], answer["limits"])


def squeezed(text: str) -> list[str]:
    """Lines whose columns are two blanks apart."""
    return ["  ".join(part.strip() for part in line.split("  ") if part.strip()) for line in text.splitlines()]


def test_ls(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    first = dead(http, rollout(run=run, policy_version=7, prompt=5, lengths=(4, 6)), "a long story " * 20)
    second = ready(http, rollout(run=run))
    status, out, err = command("ls", "--run", run)
    assert (status, err) == (0, "")
    headers, *lines = squeezed(out)
    assert headers.split("  ")[:6] == ["id", "run", "epoch", "version", "state", "age"]
    assert headers.split("  ")[6:] == ["tokens", "deliveries", "consumer", "reason"]
    assert [line.split()[0] for line in lines] == [second, first], "the newest first"
    assert lines[1].startswith(f"{first}  {run}  0  7  dead  ")
    assert "  15  1  given back by " in lines[1]
    assert lines[1].endswith("a long story " * 19 + "a long story"), "a pipe gets whole lines"
    assert command("ls", "--run", run, "--state", "ready")[1].splitlines()[1].startswith(second)
    status, out, _ = command("ls", "--run", run, "--state", "dead", "--json")
    assert (status, [batch["id"] for batch in json.loads(out)["batches"]]) == (0, [first])
    assert command("ls", "--run", "nobody's") == (0, "", "no such batch\n")


def test_ls_over_many_pages(
    command: Command, http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [ready(http, rollout(run=run)) for _ in range(5)][::-1]
    monkeypatch.setattr(views, "PAGE", 2)

    def listed(*arguments: str) -> tuple[list[str], str, Any]:
        _, out, err = command("ls", "--run", run, *arguments)
        page = json.loads(command("ls", "--run", run, "--json", *arguments)[1])
        assert [line.split()[0] for line in out.splitlines() if run in line] == [
            batch["id"] for batch in page["batches"]
        ]
        return [batch["id"] for batch in page["batches"]], err, page["next_cursor"]

    assert listed() == (ids, "", None)
    assert listed("--limit", "0") == (ids, "", None)
    assert listed("--limit", "5") == (ids, "", None)
    some, err, cursor = listed("--limit", "3")
    assert some == ids[:3]
    assert "the 3 newest; there are more" in err
    rest = http.get("/v1/batches", params={"run": run, "cursor": cursor, "order": "newest"}).json()["batches"]
    assert [batch["id"] for batch in rest] == ids[3:]


def test_show(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    rewards = np.array([1, np.nan, 0.5], dtype=np.float32)
    id = dead(http, rollout(run=run, rewards=rewards, reward_parts={"accuracy": rewards}))
    status, out, err = command("show", id)
    assert (status, err) == (0, "")
    assert "state            dead" in out
    assert "3 completions, 12 tokens; prompt 5" in out
    history = [line.split()[4] for line in out.splitlines() if " s  " in line]
    assert history == ["queued", "scoring", "ready", "leased", "ready", "leased", "dead"]
    assert "completion 0" not in out
    out = command("show", id, "--tokens")[1]
    assert "completion 0: reward 1, accuracy 1; 4 tokens, finished" in out
    assert "completion 1: reward not judged, accuracy not judged; 1 tokens, finished" in out
    printed, answer = json.loads(command("show", id, "--tokens", "--json")[1]), http.get(f"/v1/batches/{id}").json()
    assert printed == answer | {"tokens": http.get(f"/v1/batches/{id}/tokens").json()}
    assert json.loads(command("show", id, "--json")[1]) == answer


def test_a_kept_sample(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    batch = rollout(run=run, lengths=(2, 2), rewards=np.array([1, 0], np.float32))
    id = ready(http, batch)
    leased = http.post("/v1/batches/lease", json={"consumer": "c", "run": run}).headers
    assert leased["Batch-Id"] == id
    training = wire.encode_training(Training(12, np.array([0.5, 0.5, -0.5, -0.5], np.float32), np.zeros(4, np.float32)))
    http.put(
        f"/v1/batches/{id}/training", content=training, headers={"Content-Type": wire.CONTENT_TYPE}
    ).raise_for_status()
    http.post("/v1/leases/ack", json={"leases": [{"id": id, "token": leased["Lease-Token"]}]}).raise_for_status()
    ready(http, rollout(run=run))
    out = command("show", id, "--tokens")[1]
    assert "trained in step 12" in out and "completion 0: reward 1, advantage +0.50; 2 tokens" in out
    listed = json.loads(command("ls", "--run", run, "--state", "done", "--kept", "--json")[1])["batches"]
    assert [batch["id"] for batch in listed] == [id]
    http.delete(f"/v1/batches/{id}").raise_for_status()
    assert command("ls", "--run", run, "--state", "done", "--kept")[2].strip() == "no such batch"


def test_a_payload_that_is_gone(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    id = ready(http, rollout(run=run))
    http.delete(f"/v1/batches/{id}").raise_for_status()
    status, out, err = command("show", id, "--tokens")
    assert status == 0
    assert "payload          gone" in out
    assert "its payload is gone" in err and f"policy-trainer samples RUN_DIR --batch {id}" in err
    assert json.loads(command("show", id, "--tokens", "--json")[1])["tokens"] is None


def test_what_clients_say_does_not_steer_the_terminal(
    command: Command, http: httpx.Client, rollout: Rollout, run: str
) -> None:
    id = dead(http, rollout(run=run), "\x1b[31m[red]:smile:\n")
    for arguments in (["ls", "--run", run], ["show", id]):
        out = command(*arguments)[1]
        assert "\x1b" not in out
        assert r"\x1b[31m[red]:smile:\n" in out


# Bringing back


def test_requeue_some(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    first, second = dead(http, rollout(run=run)), dead(http, rollout(run=run))
    fine = ready(http, rollout(run=run))
    status, out, err = command("requeue", first, fine, UNKNOWN, "a/b", second, first)
    assert (status, out) == (1, "2 batches brought back\n")
    assert [line.partition(": ")[0] for line in err.splitlines()] == [fine, UNKNOWN, "a/b"]
    assert "only an expired or a dead batch" in err
    assert {state(http, id) for id in (first, second)} == {"ready"}
    err = command("requeue", *(f"nobody-{number}" for number in range(25)))[2]
    assert err.count("is known here") == 20 and err.endswith("and 5 more; --json lists all\n")
    status, out, err = command("requeue", fine, UNKNOWN, "--json")
    answer = json.loads(out)
    assert (status, err, answer["requeued"]) == (1, "", [])
    assert [(failure["id"], failure["status"]) for failure in answer["failed"]] == [(fine, 409), (UNKNOWN, 404)]
    assert "is known here" in answer["failed"][1]["message"]


def test_requeue_all_of_a_state(
    command: Command, http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [dead(http, rollout(run=run)) for _ in range(3)]
    other = dead(http, rollout(run=f"{run}-other"))
    dropped = ready(http, rollout(run=run))
    http.delete(f"/v1/batches/{dropped}").raise_for_status()
    monkeypatch.setattr(views, "PAGE", 2)
    status, out, _ = command("requeue", "--state", "dead", "--run", run, "--json")
    assert status == 0
    assert json.loads(out) == {"requeued": [{"id": id, "state": "ready"} for id in ids], "failed": []}
    assert state(http, other) == "dead"
    # A dropped batch cannot come back; that is a failure only for a batch that was named.
    assert command("requeue", "--state", "expired", "--run", run) == (0, "0 batches brought back\n", "")


# Dropping


@pytest.mark.parametrize("typed", ["n\n", "\n", ""])
def test_purge_asks_and_hears_no(
    command: Command, terminal: Callable[[str], Terminal], http: httpx.Client, rollout: Rollout, run: str, typed: str
) -> None:
    id = dead(http, rollout(run=run))
    screen = terminal(typed)
    assert command("purge", id)[:2] == (1, "")
    assert "Drop 1 batch, <0.1 MiB, for good?" in screen.getvalue()
    assert "nothing was purged" in screen.getvalue()
    assert state(http, id) == "dead"


def test_purge_asks_and_hears_yes(
    command: Command, terminal: Callable[[str], Terminal], http: httpx.Client, rollout: Rollout, run: str
) -> None:
    ids = [dead(http, rollout(run=run)) for _ in range(12)]
    screen = terminal("y\n")
    assert command("purge", "--state", "dead", "--run", run)[:2] == (0, "12 batches purged, <0.1 MiB\n")
    assert "Drop 12 batches" in screen.getvalue()
    assert "purged" in screen.getvalue(), "a bar shows how far it is"
    assert {state(http, id) for id in ids} == {"expired"}


def test_purge_without_a_terminal(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    id = dead(http, rollout(run=run))
    status, out, err = command("purge", "--state", "dead", "--run", run)
    assert (status, out) == (1, "")
    assert "would drop 1 batch" in err
    assert "--yes" in err
    assert state(http, id) == "dead"
    size = http.get(f"/v1/batches/{id}").json()["payload_bytes"]
    status, out, err = command("purge", "--state", "dead", "--run", run, "--yes", "--json")
    assert (status, err, json.loads(out)) == (0, "", {"purged": [id], "bytes": size, "failed": []})
    assert state(http, id) == "expired"
    # There is nothing left, so nothing to ask.
    assert command("purge", "--state", "expired", "--run", run) == (0, "0 batches purged, 0.0 MiB\n", "")


def test_purge_by_age(
    command: Command, http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = ready(http, rollout(run=run))
    arguments = ["purge", "--state", "ready", "--run", run, "--older-than-days", "1", "--yes"]
    assert command(*arguments)[1] == "0 batches purged, 0.0 MiB\n"
    admitted = http.get(f"/v1/batches/{id}").json()["admitted_at"]
    monkeypatch.setattr("ref_server.cli.queue.changes.time.time", lambda: admitted + 86_401)
    assert command(*arguments)[1] == "1 batch purged, <0.1 MiB\n"
    assert state(http, id) == "expired"


def test_purge_by_name(command: Command, http: httpx.Client, rollout: Rollout, run: str) -> None:
    id = ready(http, rollout(run=run))
    status, out, err = command("purge", UNKNOWN, id, "--yes")
    assert (status, out) == (1, "1 batch purged, <0.1 MiB\n")
    assert err.startswith(UNKNOWN)
    assert err.count("\n") == 1
    answer = json.loads(command("purge", UNKNOWN, "--yes", "--json")[1])
    assert (answer["purged"], answer["failed"][0]["status"]) == ([], 404)


def test_an_end_in_the_middle_says_how_far_it_came(
    command: Command,
    http: httpx.Client,
    rollout: Rollout,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [dead(http, rollout(run=run)) for _ in range(3)]
    drop = RefServerClient.drop

    def drop_one(client: RefServerClient, id: str) -> None:
        if id != ids[0]:
            raise NotRefServer("the server has gone")
        drop(client, id)

    monkeypatch.setattr(RefServerClient, "drop", drop_one)
    status, _, err = command("purge", *ids, "--yes")
    assert status == 1
    assert err.endswith("ref-server queue purge: the server has gone; give the URL that `ref-server serve` prints\n")
    assert err.startswith("1 of 3 were purged before this ended\n")
    assert [state(http, id) for id in ids] == ["expired", "dead", "dead"]


def test_a_server_whose_clock_is_ahead_has_all_purged(
    command: Command, http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [ready(http, rollout(run=run)) for _ in range(2)]
    now = time.time()
    monkeypatch.setattr("ref_server.cli.queue.changes.time.time", lambda: now - 60)
    assert command("purge", "--state", "ready", "--run", run, "--yes")[0] == 0
    assert [state(http, id) for id in ids] == ["expired", "expired"]


def test_what_comes_after_the_question_stays(
    command: Command, terminal: Callable[[str], Terminal], http: httpx.Client, rollout: Rollout, run: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chosen = ready(http, rollout(run=run))
    later: list[str] = []
    purge = RefServerClient.purge

    def late(client: RefServerClient, chosen: PurgeBody) -> Purged:
        later.append(ready(http, rollout(run=run)))
        return purge(client, chosen)

    monkeypatch.setattr(RefServerClient, "purge", late)
    screen = terminal("y\n")
    assert command("purge", "--state", "ready", "--run", run)[:2] == (0, "1 batch purged, <0.1 MiB\n")
    assert "Drop 1 batch" in screen.getvalue()
    assert state(http, chosen) == "expired"
    until(lambda: state(http, later[0]) == "ready")


def test_an_end_between_slices_says_how_far_it_came(
    command: Command, http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [ready(http, rollout(run=run)) for _ in range(3)]
    purge = RefServerClient.purge

    def purge_once(client: RefServerClient, chosen: PurgeBody) -> Purged:
        if chosen.cursor is not None:
            raise NotRefServer("the server has gone")
        return purge(client, chosen)

    monkeypatch.setattr("ref_server.queue.housekeeping.SLICE", 2)
    monkeypatch.setattr(RefServerClient, "purge", purge_once)
    status, out, err = command("purge", "--state", "ready", "--run", run, "--yes")
    assert (status, out) == (1, "")
    assert err.startswith("2 of 3 were purged before this ended\nref-server queue purge: the server has gone")
    assert [state(http, id) for id in ids] == ["expired", "expired", "ready"]


# What goes wrong


def test_no_server(command: Command) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, out, err = command("stats", "--url", url)
    assert (status, out) == (1, "")
    assert f"ref-server queue stats: no server answers at {url}" in err


def test_a_refusal_has_the_words_of_the_server(command: Command) -> None:
    status, out, err = command("show", UNKNOWN)
    assert (status, out) == (1, "")
    assert err.startswith(f"ref-server queue show: no batch '{UNKNOWN}' is known here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", "invalid choice: 'fly' (choose from"),
        ("show", "required: ID"),
        ("requeue", "name batches, or choose them by --state"),
        ("requeue a --state dead", "one of the two"),
        ("requeue a --run r", "--run goes with --state"),
        ("requeue --state ready", "state: Input should be 'dead' or 'expired'"),
        ("purge a --older-than-days 3", "--older-than-days goes with --state"),
        ("purge --state done", "state: "),
        ("ls --state gone", "state: "),
        ("ls --limit -1", "limit: "),
        ("ls --url localhost:8400", "url: "),
        ("ls --surprise", "--surprise"),
    ],
)
def test_commands_that_cannot_be(command: Command, arguments: str, message: str) -> None:
    status, out, err = command(*arguments.split())
    assert (status, out) == (2, "")
    assert message in err


def test_the_environment_of_a_server_does_no_harm(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REF_SERVER_PORT", "1")
    monkeypatch.setenv("REF_SERVER_QUEUE__MAX_MIB", "1")
    assert command("ls", "--limit", "1")[0] == 0
    monkeypatch.setenv("REF_SERVER_YES", "1")
    status, _, err = command("purge", "--state", "dead")
    assert status == 2
    assert "REF_SERVER_YES is not a setting" in err


def test_help(command: Command) -> None:
    status, out, _ = command("--help")
    assert status == 0
    assert all(f"\n    {verb} " in out for verb in queue.COMMANDS)
    assert command()[0] == 2
    for verb in queue.COMMANDS:
        status, out, _ = command(verb, "--help")
        assert status == 0
        assert out.startswith(f"usage: ref-server queue {verb} ")
        named = ("--data-dir", "--store") if verb == "backup" else ("REF_SERVER_URL", "--json")
        assert all(name in out for name in named)


# As a process


@pytest.mark.slow
def test_ctrl_c(http: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "ref_server", "queue", "stats", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (128 + signal.SIGINT, "")
    assert "Traceback" not in err
