"""Workers that share nothing with the trainer but the server's URL, and a token each."""

from pathlib import Path

from tests.integration.processes import Process, Server, steps_of
from tests.integration.runs import QUICK, train

TRAINER, WORKER = "trainer-0123456789abcdef", "worker-0123456789abcdef"
STEPS = 8


def test_workers_need_a_url_and_a_token_alone(random_model: Path, tmp_path: Path, start) -> None:
    tokens = {"server": f"train {TRAINER}\nupload {WORKER} run=run\n", "trainer": TRAINER, "worker": WORKER}
    files = {name: tmp_path / f"{name}.tokens" for name in tokens}
    for name, text in tokens.items():
        files[name].write_text(text)
        files[name].chmod(0o600)
    server = start(Server(random_model, tmp_path / "server", None, "--token-file", str(files["server"])))
    place = tmp_path / "trainer" / "run"
    place.parent.mkdir()
    trainer = start(
        train(
            random_model, server.until_ready(), place, *QUICK, "--max-steps", str(STEPS), "--max-lag", "4",
            "--rollout", "external", "--weights", "server", "--token-file", str(files["trainer"]),
        )
    )  # fmt: skip
    workers = [
        start(
            Process(
                "policy_trainer", "rollout", "--server", server.url, "--run", "run",
                "--worker", str(worker), "--workers", "2", "--run-dir", str(tmp_path / f"worker-{worker}"),
                "--threads", "1", "--token-file", str(files["worker"]), log=tmp_path / f"worker-{worker}.log",
            )
        )
        for worker in range(2)
    ]  # fmt: skip
    assert trainer.wait() == 0, trainer.output() + workers[0].output()
    for worker in workers:
        assert worker.wait() == 0, worker.output()
        assert "the run is finished" in worker.output()
    steps = steps_of(place)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    compared = [record["probe_logp_difference"] for record in steps]
    assert max(difference for difference in compared if difference is not None) < 1e-3
    assert max(record["staleness_max"] for record in steps) <= 4
    assert min(record["staleness"] for record in steps[2:]) < 4  # new weights do arrive
    assert [path.name for path in (place / "weights").iterdir()] == ["latest.json"]
    for worker in range(2):
        kept = [path.parent.name for path in (tmp_path / f"worker-{worker}").rglob("model.safetensors")]
        assert 1 <= len(kept) <= 2
        assert not list((tmp_path / f"worker-{worker}").rglob("*.part"))


def test_the_trainer_s_own_server_and_worker(random_model: Path, tmp_path: Path, start) -> None:
    run_dir = tmp_path / "run"
    trainer = start(
        Process(
            "policy_trainer", "train", "--model", str(random_model), "--run-dir", str(run_dir), *QUICK,
            "--max-steps", "3", "--weights", "server", log=tmp_path / "log",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    assert [record["step"] for record in steps_of(run_dir)] == [1, 2, 3]
