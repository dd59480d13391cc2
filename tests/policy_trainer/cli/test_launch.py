"""`policy-trainer launch --slurm --dry-run`: what its scripts would run. tests/integration/test_slurm.py runs them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from policy_trainer.cli.launch.slurm import launch
from policy_trainer.cli.settings import read_settings
from policy_trainer.config import TrainConfig
from ref_server.access.keys import Role
from ref_server.config import ServeConfig
from shared.errors import UserError
from shared.settings import load_settings
from tests.harness.models import tiny_model

NAMES = ("job.sh", "server.sbatch", "trainer.sbatch", "workers.sbatch", "submit.sh")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(tiny_model(tmp_path))


def written(*arguments: str, run_dir: str = "runs/it") -> dict[str, str]:
    """The scripts of a dry run. bash accepts each."""
    assert launch(["--slurm", "--dry-run", "--run-dir", run_dir, *arguments]) == 0
    scripts = {name: Path(run_dir, "slurm", name) for name in NAMES}
    for script in scripts.values():
        subprocess.run(["bash", "-n", script], check=True)
    return {name: script.read_text() for name, script in scripts.items()}


def words(script: str, beginning: str) -> list[str]:
    """The words of a command up to the end of its line."""
    line = re.search(rf"{re.escape(beginning)} ?(.*?)\)?$", script, re.MULTILINE)
    assert line is not None
    return shlex.split(line[1])


def options(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)", script, re.MULTILINE))


def test_server_and_trainer_understand_their_arguments(model: str) -> None:
    scripts = written("--model", model, "--max-steps", "7", "--data.system-prompt", "it's $HOME", "--loss.beta", "0.1")
    arguments = words(scripts["server.sbatch"], "exec ref-server serve")
    tokens = Path("runs/it/slurm/tokens")
    places = {"$here/tokens": str(tokens), "$port": "8400", "$local_files/data": "data"}
    served = load_settings(ServeConfig, [places.get(word, word) for word in arguments], prog="it", schema=ServeConfig)
    assert served.model == model and served.host == "0.0.0.0"
    trained = read_settings(TrainConfig, words(scripts["trainer.sbatch"], "train=(train"), "train")
    assert trained.resume and trained.rollout == "external" and trained.max_steps == 7
    assert trained.data.system_prompt == "it's $HOME"
    assert served.max_batch_tokens >= trained.sampling.num_generations * trained.sampling.max_completion_length
    for name, role in (("upload", Role.UPLOAD), ("train", Role.TRAIN), ("admin", Role.ADMIN)):
        file = tokens.with_name(f"{name}.token")
        principal = served.keys.principal(f"Bearer {file.read_text().strip()}")
        assert principal is not None and principal.role is role
        assert principal.run == ("" if role is Role.ADMIN else "it") or principal.run is None
        assert file.stat().st_mode & 0o077 == tokens.stat().st_mode & 0o077 == 0
    assert "upload.token" in scripts["workers.sbatch"] and "train.token" not in scripts["workers.sbatch"]
    assert "train.token" in scripts["trainer.sbatch"] and "admin.token" not in scripts["trainer.sbatch"]


def test_each_job_gets_the_gpus_that_it_uses(model: str) -> None:
    scripts = written(
        "--model", model, "--nodes", "2", "--gpus-per-node", "4", "--workers", "3", "--sampler", "vllm",
        "--vllm.tensor-parallel-size", "2", "--sbatch=--partition=big", "--worker-sbatch=--partition=cheap",
    )  # fmt: skip
    server, trainer, workers = (options(scripts[f"{role}.sbatch"]) for role in ("server", "trainer", "workers"))
    assert {"--nodes=1", "--gpus-per-node=1", "--partition=big"} <= server
    assert {"--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=1", "--partition=big"} <= trainer
    assert {"--gpus-per-node=2", "--array=0-2"} <= workers
    assert scripts["workers.sbatch"].index("--partition=big") < scripts["workers.sbatch"].index("--partition=cheap")
    assert "srun" in scripts["trainer.sbatch"] and "--nproc-per-node 4" in scripts["trainer.sbatch"]


def test_one_process_needs_neither_torchrun_nor_srun(model: str) -> None:
    scripts = written("--model", model)
    assert "torchrun" not in scripts["trainer.sbatch"] and "srun" not in scripts["trainer.sbatch"]
    assert "--gpus-per-node=1" in options(scripts["trainer.sbatch"])
    scripts = written("--model", model, "--gpus-per-node", "0", run_dir="runs/without")
    assert not any("gpus" in option for script in scripts.values() for option in options(script))


def test_without_a_model_to_score_with_the_server_needs_no_gpu(model: str) -> None:
    scripts = written("--model", model, "--loss.beta", "0")
    assert "--no-model" in scripts["server.sbatch"]
    assert not any("gpus" in option for option in options(scripts["server.sbatch"]))


def test_renewing_the_reference_takes_an_admin_and_a_directory_of_snapshots(model: str) -> None:
    scripts = written("--model", model, "--loss.beta", "0.1", "--reference.sync-steps", "5")
    assert "admin.token" in scripts["trainer.sbatch"]
    snapshots = str(Path("runs/it/snapshots").resolve())
    assert f"--snapshot-root {snapshots}" in scripts["server.sbatch"]
    assert f"--reference.snapshot-root {snapshots}" in scripts["trainer.sbatch"]


def test_tokens_stay_when_the_scripts_are_written_again(model: str) -> None:
    written("--model", model)
    before = Path("runs/it/slurm/tokens").read_text()
    written("--model", model)
    assert Path("runs/it/slurm/tokens").read_text() == before


def test_a_run_that_was_launched_before(model: str) -> None:
    """Its config.toml has the server and the token that its jobs set."""
    written("--model", model)
    place = Path("runs/it/slurm").resolve()
    (place / "server.url").write_text("http://node7:8412\n")
    written("--model", model, "--server", "http://node7:8412", "--token-file", str(place / "train.token"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--server", "http://elsewhere:8400"], "server: `launch` starts the reference server"),
        (["--weights", "server"], "weights: the jobs read them from RUN_DIR"),
        (["--token-file", "mine"], "token: `launch` makes a token for each job"),
        (["--sampler", "vllm-server", "--vllm-url", "http://localhost:8000"], "sampler: the workers' jobs start no"),
        (["--run", "a run"], "run: jobs and tokens are named after it, got 'a run'"),
    ],
)
def test_what_is_refused(model: str, arguments: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        launch(["--slurm", "--dry-run", "--run-dir", "runs/it", "--model", model, *arguments])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "0"], "must be a number from 1, got '0'"),
        (["--gpus-per-node", "x"], "must be a number from 0, got 'x'"),
        (["--sbatch=partition=gpu"], "must be an option, as in --sbatch=--partition=gpu"),
        (["--sbatch=--comment=a\n#SBATCH --b"], "must be an option"),
        (["--learning-rte", "1"], "learning-rte"),
    ],
)
def test_what_cannot_be_read(
    model: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch(["--slurm", "--dry-run", "--run-dir", "runs/it", "--model", model, *arguments])
    assert problem in capsys.readouterr().err


def test_without_sbatch(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="sbatch is not on PATH"):
        launch(["--slurm", "--run-dir", "runs/it", "--model", model])
    assert not Path("runs").exists()
