"""Several runs at once, on one server and on two servers that share a store, do not mix."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.integration.processes import Server, steps_of, until
from tests.integration.runs import QUICK, assert_trained_exactly_once, train
from tests.postgresql import postgres


@pytest.mark.parametrize("backend", [pytest.param("sqlite", marks=pytest.mark.long), "postgresql"])
def test_two_runs_at_once(random_model: Path, tmp_path: Path, start, backend: str) -> None:
    with postgres() if backend == "postgresql" else nullcontext() as cluster:
        servers = [start(Server(random_model, tmp_path / "one"))]
        if cluster:
            shared = ("--store", cluster.create_database("shared"))
            servers = [start(Server(random_model, tmp_path / name, None, *shared)) for name in ("one", "two")]
        trainers = {
            name: start(
                train(random_model, servers[-place].until_ready(), tmp_path / name, *QUICK, "--max-steps", "10")
            )
            for place, name in enumerate(("first", "second"))
        }
        for name, trainer in trainers.items():
            assert trainer.wait() == 0, trainer.output()
            assert [record["step"] for record in steps_of(tmp_path / name)] == list(range(1, 11))
            for server in servers:  # the same store behind both
                assert_trained_exactly_once(server, tmp_path / name)


def test_one_of_two_servers_dies(random_model: Path, tmp_path: Path, start) -> None:
    """The other server scores what it had begun; the trainer, which uses the other server, is not affected."""
    with postgres() as cluster:
        shared = ("--store", cluster.create_database("shared"))
        servers = [start(Server(random_model, tmp_path / name, None, *shared)) for name in ("one", "two")]
        run_dir = tmp_path / "run"
        trainer = start(train(random_model, servers[1].until_ready(), run_dir, *QUICK, "--max-steps", "20"))
        until(lambda: len(steps_of(run_dir)) >= 5, "step 5", trainer)
        servers[0].until_ready().kill()
        assert trainer.wait() == 0, trainer.output()
        assert_trained_exactly_once(servers[1], run_dir)
