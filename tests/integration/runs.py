"""Training runs as a user would start them, and what must be true of each when it has ended."""

from pathlib import Path

from tests.integration.processes import Process, Server, steps_of

QUICK = (
    "--threads", "1", "--sampling.num-generations", "4", "--sampling.prompts-per-round", "4", "--groups-per-step", "4",
    "--sampling.max-completion-length", "12", "--evaluation.problems", "16", "--evaluation.eval-steps", "0",
    # A random model gets the same reward everywhere: groups without variance must train, if only on the KL.
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-4", "--checkpoint.save-steps", "5",
)  # fmt: skip


def train(model: Path | str, server: Server | None, run_dir: Path, *options: str) -> Process:
    """server: None for one that the trainer starts itself."""
    place = () if server is None else ("--server", server.url)
    return Process(
        "policy_trainer", "train", "--model", str(model), *place, "--run-dir", str(run_dir), *options,
        log=run_dir.parent / f"{run_dir.name}.log",
    )  # fmt: skip


def assert_trained_exactly_once(server: Server, run_dir: Path) -> None:
    """The batches in the run's metrics are those that are done on the server, each once."""
    trained = [id for record in steps_of(run_dir) for id in record["batch_ids"]]
    assert len(trained) == len(set(trained)), "a batch was trained twice"
    done = {batch["id"] for batch in server.batches(run=run_dir.name, state="done")}
    assert set(trained) == done
    assert not server.batches(run=run_dir.name, state="dead")
