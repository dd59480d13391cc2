"""Runs the commands of the pages, page by page: `make docs-test`.

Every page starts in an empty directory with the files that it mentions. Models that it names are there, in a Hugging
Face cache without a network: tiny ones. ELSEWHERE says which commands are not run here, _SMALLER which are run with
smaller settings.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy_trainer.cli.demo.base_model import cached_base_model
from tests.docs.pages import PAGES, PLACEHOLDER, ROOT, Block, Command, blocks, commands
from tests.harness.processes import until

# Pattern in a command -> where it is tried instead, or why not.
ELSEWHERE: Mapping[str, str] = {
    r"^make ": "continuous integration runs it",
    r"docker compose": "make docker-test",
    r"(?i)vllm": "make test-vllm",
    r"pip (un)?install": "would change the environment that runs this",
    r"\.example\b|://gpu1": "the reader's own machines",
    r"--task (gsm8k|math)\b(?!.*--data\.path)|--preset simple-grpo": "downloads a dataset",
    r"--device-map": "needs several GPUs",
    rf"{PLACEHOLDER}|\bID\b|\$ID|\$DATABASE|--model M\b": "the reader's own values",
    r"ref-server queue (export|import)": "tests/ref_server/cli, with stores that hold something",
    r"curl -s -K -": "tests/integration/test_workers.py, while the run's server is there",
    r"\blm_eval\b": "make test-clients",
    r"-m benchmarks\b|tests\.chaos": "a benchmark",
    r"\bhf auth\b|policy-trainer push .*--repo": "tests/policy_trainer/cli/test_push.py, with a stand-in of the Hub",
}
# Python that `make test-clients` runs, where the client is installed.
_OF_A_CLIENT = "import tinker\n"
# Settings of `train` that make a run one of seconds; what the page says of them is left out.
_TRAIN = {
    "--max-steps": "2",
    "--groups-per-step": "2",
    "--sampling.num-generations": "8",
    "--sampling.prompts-per-round": "2",
    "--sampling.max-completion-length": "24",
    "--evaluation.problems": "4",
    "--data.system-prompt": "''",
    "--threads": "1",
}
_SMALLER: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("policy-trainer", "train"): _TRAIN,
    ("policy-trainer", "doctor"): _TRAIN,
    ("policy-trainer", "dashboard"): {"--port": "8400"},
    ("policy-trainer", "eval"): {"--evaluation.problems": "4", "--sampling.max-completion-length": "16"},
}
# What a run of two steps does not have.
_STANDS_FOR = {"step-00000400": "step-00000010", "--checkpoint 40": "--checkpoint 10"}
# This machine has no GPU.
_GPU = re.compile(r"\bcuda:\d")


def reason_not_to_run(command: Command) -> str | None:
    return next((reason for pattern, reason in ELSEWHERE.items() if re.search(pattern, command.text)), None)


def smaller(command: Command) -> str:
    """The command as bash takes it, with fewer and shorter samples. Redirections and pipes stay as they are."""
    text = _GPU.sub("cpu", command.text)
    for name, ours in _STANDS_FOR.items():
        text = text.replace(name, ours)
    for program, values in _SMALLER.items():
        if tuple(command.words[:2]) == program and "--resume" not in command.words:
            text = " ".join(line.partition("  #")[0].rstrip("\\ ") for line in text.splitlines())
            names = "|".join(map(re.escape, values))
            text = re.sub(rf" ({names}) \S+", "", text) + "".join(f" {name} {value}" for name, value in values.items())
    return text


def is_server(command: Command) -> bool:
    program = [word.rpartition("/")[2] for word in command.words[:2]]
    return program in (["ref-server", "serve"], ["policy-trainer", "dashboard"])


def waits_for_workers(command: Command) -> bool:
    """A trainer whose workers later commands start, in another terminal."""
    return "--rollout external" in command.text


SERVER = "http://127.0.0.1:8400"
SECONDS = 600
# Pages whose commands have tests of their own, with expected results.
OF_THEIR_OWN = {"client.md", "pieces.md", "python.md", "reward-models.md", "sft.md", "tasks.md", "rewards.md"}
# Their Python is another project's, for comparison.
QUOTED = {"coming-from-trl.md", "coming-from-simple-grpo.md"}
# Pages that assume an existing run.
AFTER_A_RUN = {
    "samples.md": ["mine"],
    "dashboard.md": ["mine", "demo"],
    "settings.md": ["mine"],
    "api.md": ["demo"],
    "report.md": ["mine", "demo"],
    "sharing.md": ["mine"],
    "tutorial.md": ["demo"],
}
# Pages that assume a running server.
BEFORE_A_SERVER = {"samples.md", "operations.md", "backup.md"}
_FILE = re.compile(r"^# (\w+\.py)\n")
_TO_WALK = [
    page
    for page in PAGES
    if page.name not in OF_THEIR_OWN and any(block.language in ("sh", "python") for block in blocks(page))
]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hub. Each model that the pages name is the demo's there, which learns sums."""
    home = tmp_path_factory.mktemp("hub")
    shutil.copytree(_base_model(), home / "model")
    config = json.loads((home / "model" / "config.json").read_text())
    (home / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    named = {name for page in PAGES for name in re.findall(r"Qwen/Qwen[\w.\-]+", page.read_text(encoding="utf-8"))}
    for name in named:
        cached = home / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(home / "model", cached / "snapshots" / "here")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("here")
    return home


@pytest.fixture(scope="session")
def environment(hub: Path) -> Mapping[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("POLICY_TRAINER_", "REF_SERVER_"))
    }
    bin_directory = Path(sys.executable).parent
    return kept | {
        "PATH": f"{bin_directory}:{kept['PATH']}",
        "PYTHONPATH": f".:{ROOT}",
        "HF_HOME": str(hub),
        "HF_HUB_OFFLINE": "1",
        "MODEL": "Qwen/Qwen2.5-0.5B-Instruct",
    }


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, environment: Mapping[str, str]) -> Path:
    """A directory with the runs that pages mention: runs/mine and runs/demo."""
    place = tmp_path_factory.mktemp("runs")
    _write_problems(place)
    data = "--task jsonl --data.path problems.jsonl --data.system-prompt ''"
    options = "--sampling.max-completion-length 24 --groups-per-step 2 --max-steps 10"
    for name in ("mine", "demo"):
        shell = f"policy-trainer train --model {_base_model()} {data} --run-dir runs/{name} {options}"
        _run(shell, place, environment)
    return place


class Walk:
    """One page's commands in one directory."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.place = place
        self.ran: list[str] = []
        self._environment = environment
        self._server: Popen[bytes] | None = None
        self._trainer: Popen[bytes] | None = None
        self._script = ""

    def block(self, block: Block) -> None:
        if block.language == "python":
            if Path(block.page).name not in QUOTED and _OF_A_CLIENT not in block.text:
                self._python(block)
        elif block.language == "sh":
            for command in commands(block):
                if reason_not_to_run(command):
                    continue
                if is_server(command):
                    self.serve(smaller(command))
                elif waits_for_workers(command):
                    self._trainer = self._begin(smaller(command))
                    until((self.place / "runs" / "mine" / "config.toml").exists, seconds=120)
                else:
                    _run(smaller(command), self.place, self._environment)
                self.ran.append(str(command))

    def _python(self, block: Block) -> None:
        """A file if its first line names one, otherwise a part of one script per page."""
        if name := _FILE.match(block.text):
            (self.place / name[1]).write_text(block.text)
            return
        self._script += block.text.replace("max_steps=100", "max_steps=2")
        (self.place / "page.py").write_text(self._script)
        _run("python page.py", self.place, self._environment)
        self.ran.append(str(block))

    def _begin(self, shell: str) -> Popen[bytes]:
        return Popen(["bash", "-c", f"exec {shell}"], cwd=self.place, env=dict(self._environment))

    def serve(self, shell: str) -> None:
        self.end()
        self._server = self._begin(shell)
        until(self._answers, seconds=120)

    def _answers(self) -> bool:
        assert self._server is not None and self._server.poll() is None, "the server has ended"
        try:
            return httpx.get(f"{SERVER}/livez").is_success
        except httpx.HTTPError:
            return False

    def end(self) -> None:
        """Awaits a trainer, which its workers have fed, and ends the server."""
        assert self._trainer is None or self._trainer.wait(SECONDS) == 0, "the trainer failed"
        self.stop()

    def stop(self) -> None:
        for process in filter(None, (self._trainer, self._server)):
            process.terminate()
            process.wait(60)
        self._trainer = self._server = None


@pytest.fixture
def walk(tmp_path: Path, environment: Mapping[str, str]) -> Iterator[Walk]:
    _write_problems(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    walk = Walk(tmp_path, environment)
    yield walk
    walk.stop()


@pytest.mark.parametrize("page", _TO_WALK, ids=lambda page: page.name)
def test_the_commands_of(page: Path, walk: Walk, runs: Path) -> None:
    for name in AFTER_A_RUN.get(page.name, ()):
        shutil.copytree(runs / "runs" / name, walk.place / "runs" / name)
    if page.name in BEFORE_A_SERVER:
        walk.serve("ref-server serve --no-model")
    for block in blocks(page):
        walk.block(block)
    walk.end()
    if not walk.ran:  # all are listed in ELSEWHERE
        pytest.skip("; ".join(sorted({reason_not_to_run(c) or "" for b in blocks(page) for c in commands(b)})))


@pytest.mark.parametrize("config", sorted((ROOT / "examples").glob("*/*.toml")), ids=lambda path: path.stem)
def test_an_example(config: Path, hub: Path, tmp_path: Path, environment: Mapping[str, str]) -> None:
    """Two steps of it, or SFT, with a tiny model, whose answers may all be wrong."""
    place = tmp_path / "example"
    shutil.copytree(config.parent, place, ignore=shutil.ignore_patterns("*.jsonl", "model", "runs"))
    arguments = " gsm8k --max-steps 2 --demonstrations 20" if config.parent.name == "gsm8k" else ""
    if arguments:
        _write_gsm8k(place / "gsm8k")
    _run(f"python make_problems.py{arguments}", place, environment)
    model = hub / "model"
    if (place / "make_model.py").exists():
        _run(f"python make_model.py {_chatting(model, tmp_path / 'chatting')}", place, environment)
        model = place / "model"
    if config.stem == "sft":
        _run(f"policy-trainer sft --config {config.name} --model {model}", place, environment)
        return
    options = " ".join(f"{name} {value}" for name, value in _TRAIN.items() if name != "--data.system-prompt")
    shell = f"policy-trainer train --config {config.name} --model {model} --no-loss.drop-zero-variance"
    _run(f"{shell} --evaluation.eval-steps 2 {options}", place, environment)


def _base_model() -> Path:
    return cached_base_model(ROOT / "runs" / "base_models", 0, lambda done, total: None)


def _chatting(model: Path, place: Path) -> Path:
    """The model with the tokens of SmolLM2's turns, of which one ends its answers."""
    tokenizer, wider = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    wider.resize_token_embeddings(len(tokenizer))
    wider.generation_config.eos_token_id = tokenizer.eos_token_id
    wider.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def _write_problems(place: Path) -> None:
    sums = [{"prompt": f"{a}+{a + 1}=?", "answer": str(2 * a + 1)} for a in range(40)]
    (place / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in sums))
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": problem["prompt"]}) + "\n" for problem in sums))
    shown = [{"prompt": problem["prompt"], "privileged_context": problem["answer"]} for problem in sums]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))


def _write_gsm8k(place: Path) -> None:
    """Problems in the form of GSM8K's files."""
    place.mkdir()
    rows = [
        {
            "question": f"Ann has {a} pens and buys {a + 1}. How many now?",
            "answer": f"<<{a}+{a + 1}={2 * a + 1}>>\n#### {2 * a + 1}",
        }
        for a in range(60)
    ]
    for name in ("train", "test"):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _run(shell: str, place: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell],
        cwd=place,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{shell}\nended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
