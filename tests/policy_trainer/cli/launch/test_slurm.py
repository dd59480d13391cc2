"""`policy-trainer launch --slurm --dry-run`: what its scripts would run. tests/integration/test_slurm.py runs them."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from policy_trainer.cli.launch.command import launch
from policy_trainer.cli.settings import read_settings
from policy_trainer.config import TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from ref_server.access.keys import Role
from ref_server.config import ServeConfig
from shared.errors import UserError
from shared.settings import load_settings
from tests.harness.models import tiny_model
from tests.harness.processes import until

WITH_VLLM = ("--sampler", "vllm-server", "--sampling.max-completion-length", "64")
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
    assert words(scripts["trainer.sbatch"], "train=(train") == ["--config", "$here/config.toml", "--resume"]
    trained = read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml", "--resume"], "train")
    assert trained.resume and trained.rollout == "external" and trained.max_steps == 7
    assert trained.token_file == tokens.resolve().with_name("train.token")
    assert trained.data.system_prompt == "it's $HOME"
    assert served.max_batch_tokens >= trained.sampling.num_generations * trained.sampling.max_completion_length
    for name, role in (("upload", Role.UPLOAD), ("train", Role.TRAIN), ("admin", Role.ADMIN)):
        file = tokens.with_name(f"{name}.token")
        principal = served.keys.principal(f"Bearer {file.read_text().strip()}")
        assert principal is not None and principal.role is role
        assert principal.run == ("" if role is Role.ADMIN else "it") or principal.run is None
        assert file.stat().st_mode & 0o077 == tokens.stat().st_mode & 0o077 == 0
    assert re.findall(r"\w+\.token", scripts["workers.sbatch"]) == ["upload.token"]


def test_each_job_gets_the_gpus_that_it_uses(model: str) -> None:
    scripts = written(
        "--model", model, "--nodes", "2", "--gpus-per-node", "4", "--workers", "3", "--sampler", "vllm",
        "--vllm.tensor-parallel-size", "2", "--sbatch=--partition=big", "--workers-sbatch=--partition=cheap",
    )  # fmt: skip
    server, trainer, workers = (options(scripts[f"{role}.sbatch"]) for role in ("server", "trainer", "workers"))
    assert {"--nodes=1", "--gpus-per-node=1", "--partition=big"} <= server
    assert {"--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=1", "--partition=big"} <= trainer
    assert {"--gpus-per-node=2", "--array=0-2"} <= workers
    assert scripts["workers.sbatch"].index("--partition=big") < scripts["workers.sbatch"].index("--partition=cheap")
    assert "srun" in scripts["trainer.sbatch"] and "--nproc-per-node 4" in scripts["trainer.sbatch"]


def test_each_worker_has_a_vllm_server(model: str) -> None:
    """vLLM's own parser reads these options in tests/vllm/test_launch.py."""
    settings = ("--model", model, *WITH_VLLM)
    adapters = ("--lora.rank", "5", "--lora.target-modules", "q_proj")
    command = ("--vllm-command", "'/a place/vllm' serve", "--vllm-option=--max-num-seqs=64")
    scripts = written(*settings, *adapters, *command, "--vllm.tensor-parallel-size", "2", "--vllm.enforce-eager")
    start = words(scripts["workers.sbatch"], "env")
    assert start[:4] == ["VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True", "/a place/vllm", "serve"]
    assert start[4] == model and start.index("--max-num-seqs=64") < start.index("--host")
    chosen = {name: start[start.index(name) + 1] for name in ("--dtype", "--max-model-len", "--max-lora-rank")}
    assert chosen == {"--dtype": "float32", "--max-model-len": "256", "--max-lora-rank": "8"}
    assert {"--enforce-eager", "--enable-lora"} <= set(start) and "--enable-scale-out" not in start
    assert "--gpus-per-node=2" in options(scripts["workers.sbatch"])
    assert 'sample --vllm-url "http://127.0.0.1:$port"' in scripts["workers.sbatch"]
    began = read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml"], "train")
    RunDirectory(Path("runs/it")).write_config(began)
    assert "vllm serve" in written("--resume")["workers.sbatch"]


def test_without_a_vllm_server_its_url_is_not_in_the_configuration(model: str) -> None:
    written("--model", model)
    assert "vllm_url" not in Path("runs/it/slurm/config.toml").read_text()


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
    trained = read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml"], "train")
    assert trained.token_file is not None and trained.token_file.name == "admin.token"
    assert trained.reference.snapshot_root == Path("runs/it/snapshots").resolve()
    assert f"--snapshot-root {trained.reference.snapshot_root}" in scripts["server.sbatch"]


def test_the_trainer_is_given_the_teacher_that_the_server_has(model: str) -> None:
    scripts = written("--model", model, "--loss.advantage", "distill", "--loss.beta", "0", "--teacher", model)
    assert f"--model {model}" in scripts["server.sbatch"]
    settings = ["--config", "runs/it/slurm/config.toml", "--resume", "--server", "http://node:8400"]
    assert read_settings(TrainConfig, settings, "train").teacher == model


def test_the_server_gets_the_device_that_the_reference_should_have(model: str) -> None:
    assert "--device cuda:1" in written("--model", model, "--reference.device", "cuda:1")["server.sbatch"]


def test_tokens_stay_when_the_scripts_are_written_again(model: str) -> None:
    """Unless they are valid for another run."""
    tokens = Path("runs/it/slurm/tokens")
    written("--model", model)
    before = tokens.read_text()
    written("--model", model)
    assert tokens.read_text() == before
    written("--model", model, "--run", "other")
    assert tokens.read_text() != before and "run=other" in tokens.read_text()


def test_a_run_that_was_launched_before_can_be_resumed(model: str) -> None:
    """Its config.toml has the URL of a server that is gone, and the token of its jobs."""
    written("--model", model, "--max-steps", "5")
    token_file = str(Path("runs/it/slurm/train.token").resolve())
    began = read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml"], "train")
    RunDirectory(Path("runs/it")).write_config(began.model_copy(update={"server": "http://node7:8412"}))
    written("--resume")
    trained = read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml"], "train")
    assert trained.max_steps == 5 and trained.server == "inline" and str(trained.token_file) == token_file


def test_settings_of_an_attempt_that_took_no_step_are_gone(model: str) -> None:
    """The trainer's job resumes, and would take over from its config.toml what is no longer given."""
    RunDirectory(Path("runs/it")).write_config(TrainConfig(model=model, max_lag=3))
    written("--model", model)
    assert read_settings(TrainConfig, ["--config", "runs/it/slurm/config.toml", "--resume"], "train").max_lag is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--server", "http://elsewhere:8400"], "server: `launch` starts the reference server"),
        (["--weights", "server"], "weights: `launch` chooses how they reach the workers"),
        (["--token-file", "mine"], "token: `launch` makes a token for each job"),
        (["--sampler", "vllm-server", "--vllm-url", "http://gpu7:8000"], "vllm_url: `launch` starts a vLLM server"),
        (["--sampler", "vllm", "--vllm-command", "vllm"], "--vllm-command: sampler vllm has no vLLM server"),
        (["--vllm-option=--seed=3"], "--vllm-option: sampler hf has no vLLM server"),
        (["--sampler", "vllm", "--vllm.enable-sleep-mode"], "vllm.enable_sleep_mode: each job has GPUs of its own"),
        (["--run", "a run"], "run: jobs and tokens are named after it, got 'a run'"),
    ],
)
def test_what_is_refused(model: str, arguments: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        launch(["--slurm", "--dry-run", "--run-dir", "runs/it", "--model", model, *arguments])
    assert not Path("runs").exists()


def test_vllm_needs_room_for_prompt_and_completion(model: str) -> None:
    with pytest.raises(UserError, match=r"vllm\.max_model_len: prompt and completion need 256 tokens, got 5"):
        written(*WITH_VLLM, "--model", model, "--vllm.max-model-len", "5")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nodes", "0"], "must be an integer, at least 1; got '0'"),
        (["--gpus-per-node", "x"], "must be an integer, at least 0; got 'x'"),
        (["--sbatch=partition=gpu"], "must be an option, as in --sbatch=--partition=gpu"),
        (["--vllm-option", "max-num-seqs=4"], "must be an option, as in --vllm-option=--max-num-seqs=64"),
        (["--sbatch=--comment=a\n#SBATCH --b"], "must be an option"),
        (["--learning-rte", "1"], "learning-rte"),
        (["--image", "i"], "--image"),
        (["--kubernetes"], "not allowed with argument"),
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


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Job:
    """A script in a bash of its own, with Slurm's commands replaced by ones that write down how they are called."""

    def __init__(self, directory: Path, text: str) -> None:
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        program(programs / "scontrol", f'#!/bin/sh\necho "$@" >>{directory}/called\n')
        self.scripts = Path("runs/it/slurm").resolve()
        self._called = directory / "called"
        variables = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
        environment = {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            ["bash", "-c", text], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def until_printed(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"it ended without printing {text!r}")

    def kill(self) -> None:
        """Ends all its processes, if they have not ended yet."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """The exit status, and how scontrol was called."""
        self.process.wait(timeout=60)
        return self.process.returncode, self._called.read_text() if self._called.exists() else ""


StartJob = Callable[[str], Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    jobs: list[Job] = []

    def begin(text: str) -> Job:
        jobs.append(Job(tmp_path, text))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.fixture
def start_job(model: str, start: StartJob) -> StartJob:
    """Starts a job that consists of this text and what the jobs have in common."""
    written("--model", model, "--gpus-per-node", "0")
    job = Path("runs/it/slurm/job.sh").resolve()
    return lambda body: start(f". {job}\nprogress() {{ echo; }}\npause=0\n{body}\nsupervise\n")


@pytest.mark.slow
class TestJob:
    """What the jobs have in common, without Slurm."""

    def test_the_time_limit_is_near_while_it_waits_for_the_server(self, start_job: StartJob) -> None:
        job = start_job("run_step() { echo ran; }\nfind_server")
        job.until_printed("waiting for the reference server")
        job.process.send_signal(signal.SIGUSR1)
        job.until_printed("the time limit is near: the job is requeued")
        assert job.end() == (143, "requeue 7_0\n")

    def test_cancelled_between_two_attempts(self, start_job: StartJob) -> None:
        job = start_job("pause=60\nrun_step() { exit 5; }")
        job.until_printed("status 5, failure 1 of 3 without progress")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == (5, "")

    def test_a_step_that_does_not_end_is_killed(self, start_job: StartJob) -> None:
        job = start_job("patience=1\nrun_step() { trap '' TERM; echo begun; while :; do sleep 0.1; done; }")
        job.until_printed("begun")
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == (128 + signal.SIGKILL, "requeue 7_0\n")

    def test_it_gives_up_after_three_failures_in_a_row(self, start_job: StartJob) -> None:
        job = start_job("run_step() { echo ran; exit 5; }")
        for number in (1, 2, 3):
            job.until_printed("ran")
            job.until_printed(f"status 5, failure {number} of 3")
        assert job.end() == (5, "")

    def test_a_failure_after_progress_is_the_first(self, start_job: StartJob) -> None:
        job = start_job("progress() { echo $SECONDS; }\nrun_step() { sleep 1; exit 5; }")
        for _ in range(3):
            job.until_printed("failure 1 of 3")
        (job.scripts / "ended").write_text("stopped\n")
        job.until_printed("the run has ended: stopped")
        assert job.end() == (0, "")

    def test_a_server_at_another_address(self, start_job: StartJob) -> None:
        job = start_job('run_step() { echo "with $url"; exec sleep 60; }\nfind_server')
        for port in (1, 2):
            (job.scripts / "server.url").write_text(f"http://node:{port}\n")
            job.until_printed(f"with http://node:{port}")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == (143, "")


@pytest.mark.slow
class TestWorkerWithVllm:
    """The script of a worker that has a vLLM server, with stand-ins for both programs."""

    @pytest.fixture
    def start_worker(
        self, model: str, start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Job]:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "python").symlink_to(sys.executable)
        program(programs / "policy-trainer", "#!/bin/sh\necho $$ >worker.pid\necho sampling\n. ./worker.sh\n")
        program(
            programs / "vllm",
            f"""#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

open("vllm.pid", "w").write(str(os.getpid()))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
""",
        )
        monkeypatch.setattr("sys.executable", str(programs / "python"))

        def begin(worker: str, *arguments: str) -> Job:
            Path("worker.sh").write_text(worker)
            written("--model", model, *WITH_VLLM, *arguments)
            scripts = Path("runs/it/slurm")
            (scripts / "server.url").write_text("http://node:1\n")
            return start((scripts / "workers.sbatch").read_text())

        return begin

    def gone(self, name: str) -> bool:
        return not Path("/proc", Path(f"{name}.pid").read_text().strip()).exists()

    def test_when_the_worker_has_finished_vllm_ends(self, start_worker: Callable[..., Job]) -> None:
        job = start_worker("echo finished >runs/it/slurm/ended\nexit 0\n")
        assert job.end() == (0, "")
        assert self.gone("vllm") and self.gone("worker")

    def test_when_the_worker_fails_both_are_started_again(self, start_worker: Callable[..., Job]) -> None:
        job = start_worker("exit 5\n")
        job.until_printed("status 5, failure 1 of 3")
        assert self.gone("vllm")

    def test_when_vllm_ends_so_does_the_worker(self, start_worker: Callable[..., Job]) -> None:
        job = start_worker("exec sleep 600\n")
        job.until_printed("sampling")
        os.kill(int(Path("vllm.pid").read_text()), signal.SIGKILL)
        job.until_printed("vLLM ended with status 137; see vllm-0.log")
        job.until_printed("status 1, failure 1 of 3")
        assert self.gone("worker")

    def test_vllm_that_cannot_start(self, start_worker: Callable[..., Job]) -> None:
        job = start_worker("", "--vllm-command", "sh -c 'echo out of memory; exit 7'")
        job.until_printed("vLLM ended with status 7 before it was ready; see vllm-0.log")
        job.until_printed("status 1, failure 1 of 3")
        assert (job.scripts / "vllm-0.log").read_text() == "out of memory\n"

    @pytest.mark.parametrize("ready", [True, False])
    def test_near_the_time_limit_both_end(self, start_worker: Callable[..., Job], ready: bool) -> None:
        if ready:
            job = start_worker("exec sleep 600\n")
            job.until_printed("sampling")
        else:
            job = start_worker("", "--vllm-command", "sh -c 'echo $$ >vllm.pid; exec sleep 600'")
            until(lambda: Path("vllm.pid").exists() and Path("vllm.pid").read_text() != "", "vLLM")
        job.process.send_signal(signal.SIGUSR1)
        job.until_printed("the time limit is near: the job is requeued")
        assert job.end() == (143, "requeue 7_0\n")
        assert self.gone("vllm") and (not ready or self.gone("worker"))
