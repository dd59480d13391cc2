"""Wrong commands and wrong files, as people write them: each is answered in a few lines with the field and the remedy.

They run in this process, since most are found before a process starts; `main` is what a shell runs. What only shows
with a running server is tested with one.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from tests.harness.ports import free_port
from tests.harness.processes import PATIENCE, Process, processes_of, until
from tests.harness.runs import steps_of
from tests.harness.server import Server

# Lines of an error. What a command says before it (the device, what the run does) is no part of it.
MOST_LINES = 5
# Every run that a mistake stops would be this one: on the CPU, with a server that is none.
TRAIN = "train --device cpu --threads 1 --run-dir run --server http://127.0.0.1:1"
EVAL = "policy-trainer eval --model model --device cpu --evaluation.problems 2 --sampling.max-completion-length 4"

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
FILES = {
    "good.jsonl": ROWS,
    "one.jsonl": ROWS[:1],
    "empty.jsonl": [],
    "array.jsonl": [ROWS],
    "other-columns.jsonl": [{"question": row["prompt"], "solution": row["answer"]} for row in ROWS],
    "null.jsonl": [*ROWS[:3], {"prompt": "x", "answer": None}],
    "nan.jsonl": [*ROWS[:3], {"prompt": "x", "answer": float("nan")}],
    "words.jsonl": [{"messages": [{"user": "2+2="}], "answer": 4}],
}
TEXTS = {
    "text.jsonl": "2+2=4\n",
    "syntax.toml": "max_steps = \n",
    "unquoted.toml": "model = m\n",
    "value.toml": "loss = 3\n",
    "table.toml": "[max_steps]\nx = 1\n",
    "list.toml": "[data.mixture]\ntask = 'jsonl'\n",
    "misspelt.toml": "[loss]\nbetta = 0.1\n",
    "sft.toml": "batch_size = 3\n",
    "many.toml": "".join(
        f"{name} = -1\n" for name in ("seed", "threads", "max_steps", "minibatches", "max_lag", "run")
    ),
    "damaged.py": "def f(completion)\n    return 1\n",
    "raising.py": "raise RuntimeError('no key')\n",
    "mine.py": "number = 3\n\ndef by_position(completion, /):\n    return 1\n"
    "\ndef by_colour(completions, colour):\n    return [1.0] * len(completions)\n"
    "\ndef raising(completion):\n    raise LookupError('no such word')\n",
    "own.py": "class Raises:\n    def __init__(self, data, seed):\n        raise LookupError('no such file')\n"
    "\nclass Bare:\n    def __init__(self, data, seed):\n        pass\n"
    "\nclass Late(Bare):\n    name = 'late'\n    default_rewards = ('accuracy',)\n    correct = problem = print\n"
    "\n    def eval_problems(self):\n        raise LookupError('no such row')\n",
}


@dataclass(frozen=True)
class Mistake:
    """command: with its program. words: those that the answer must have: the field first, then the remedy."""

    command: str
    words: tuple[str, ...]
    status: int = 2
    environment: tuple[str, str] = ("UNUSED", "")


def train(options: str, *words: str) -> Mistake:
    return Mistake(f"policy-trainer {TRAIN} {options}", words)


def jsonl(name: str, *words: str) -> Mistake:
    return train(f"--model model --task jsonl --data.path {name}", *words)


def reward(name: str, *words: str) -> Mistake:
    return train(f"--model model --rewards {name}", "rewards:", *words)


NAMES = {
    "command": Mistake("policy-trainer trian", ("COMMAND", "did you mean train?")),
    "no model": train("", "model: is required", "--model"),
    "no run": Mistake(
        "policy-trainer train --resume --run-dir never",
        ("run_dir: there is no run in never to resume", "the directory of a run", "model"),
    ),
    "no run on rows": Mistake("policy-trainer sft --resume --run-dir never", ("no run in never to resume", "data")),
    "misspelt option": train("--model model --learning-rat 1", "--learning-rat", "--optimizer.learning-rate?"),
    "TRL's option": train("--model_name_or_path model", "--model_name_or_path", "did you mean --model?"),
    "TRL's batch": train("--per_device_train_batch_size 4", "--per_device", "--groups-per-step"),
    "vLLM": train("--model model --use_vllm", "--use_vllm", "did you mean --sampler?"),
    "no option": train("model", "model: is neither an option"),
    "no value": train("--model model --max-steps", "--max-steps", "expected one argument"),
    "variable": Mistake(
        f"policy-trainer {TRAIN} --model model", ("POLICY_TRAINER_MAXSTEPS", "POLICY_TRAINER_MAX_STEPS?"),
        environment=("POLICY_TRAINER_MAXSTEPS", "3"),
    ),
    "variable of a group": Mistake(
        f"policy-trainer {TRAIN} --model model", ("loss:", "as JSON"), environment=("POLICY_TRAINER_LOSS", "{beta"),
    ),
    "preset": train("--model model --preset dpo", "preset:", "dapo"),
    "preset to show": Mistake("policy-trainer presets show dpo", ("'dpo'", "dapo")),
    "task": train("--model model --task jsnol", "task:", "jsonl"),
    "server's option": Mistake("ref-server serve --model model --prot 1", ("--prot", "--port?")),
    "queue's command": Mistake("ref-server queue lss", ("COMMAND", "ls")),
}  # fmt: skip
VALUES = {
    "text for a number": train("--model model --max-steps many", "max_steps:", "valid integer", "'many'"),
    "out of range": train("--model model --loss.epsilon 2", "loss.epsilon:", "less than 1"),
    "float16": train("--model model --dtype float16", "dtype:", "bfloat16"),
    "group of one": train("--model model --sampling.num-generations 1", "sampling.num_generations:", "larger group"),
    "sync without KL": train(
        "--model model --loss.beta 0 --reference.sync-steps 5", "reference.sync_steps:", "--reference.sync-steps 0"
    ),
    "weights": train(
        "--model model --rewards accuracy format --reward-weights 1", "reward_weights:", "both or neither"
    ),
    "task without data": train("--model model --task jsonl", "data.path:", "--data.path FILE"),
    "server without scheme": Mistake(
        "policy-trainer train --model model --server localhost:8400", ("server:", "http://", "inline")
    ),
    "server's URL": Mistake("ref-server queue ls --url localhost:8400", ("url:", "http://")),
    "server's port": Mistake("ref-server serve --model model --port 99999", ("port:", "65535")),
    "token in sight": train("--model model --token abc", "--token", "POLICY_TRAINER_TOKEN"),
    "step": Mistake("policy-trainer samples . --step last", ("--step", "int")),
    "run without samples": Mistake("policy-trainer samples .", ("RUN:", "has trained a step")),
}
SETTINGS_FILES = {
    "missing": train("--config none.toml", "config:", "none.toml", "give a TOML file"),
    "directory": train("--config model", "config:", "Is a directory"),
    "syntax": train("--config syntax.toml", "config:", "line 1", "NAME = VALUE"),
    "no quotes": train("--config unquoted.toml", "config:", "line 1", "texts in quotes"),
    "value for a table": train("--model model --config value.toml", "loss:", "[loss]"),
    "table for a value": train("--model model --config table.toml", "max_steps:", "max_steps = VALUE"),
    "table for a list": train("--model model --config list.toml", "data.mixture:", "[[data.mixture]]"),
    "misspelt": train("--model model --config misspelt.toml", "loss.betta", "loss.beta?"),
    "another command's": train("--model model --config sft.toml", "batch_size", "`sft`"),
    "many at once": train("--model model --config many.toml", "seed:", "and 1 more"),
}
MODELS = {
    "path": train("--model ./modle", "model:", "no directory ./modle"),
    "directory without a model": train("--model empty", "model:", "config.json"),
    "no weights": train(
        "--model weightless --sampling.max-completion-length 64", "model:", "copy model.safetensors there"
    ),
    "no tokenizer": train("--model speechless", "model:", "tokenizer"),
    "damaged configuration": train("--model damaged", "model:", "config.json"),
    "to evaluate": Mistake("policy-trainer eval --model weightless --device cpu", ("model:", "model.safetensors")),
    "device": train("--model model --device cuda:7", "device:", "use auto or cpu"),
    "no device": train("--model model --device gpu", "device:", "use auto"),
    "context": train("--model model --sampling.max-completion-length 99999", "sampling.max_completion_length", "lower"),
    "run directory": Mistake(
        "policy-trainer train --model model --device cpu --run-dir good.jsonl", ("run_dir:", "another --run-dir")
    ),
    "tracker": train("--model model --report-to wandb", "report_to:", "pip install wandb"),
    "directory of the demo": Mistake("policy-trainer demo-setup --run-dir good.jsonl", ("run_dir:", "--run-dir")),
}
DATA = {
    "missing": jsonl("none.jsonl", "data.path:", "No such file"),
    "directory": jsonl("model", "data.path:", "Is a directory"),
    "empty": jsonl("empty.jsonl", "data.path:", "one JSON object a line"),
    "one row": jsonl("one.jsonl", "data.path:", "add problems"),
    "text": jsonl("text.jsonl", "text.jsonl:1", "one JSON object a line"),
    "array": jsonl("array.jsonl", "array.jsonl:1", "one a line"),
    "columns": jsonl("other-columns.jsonl", "data.path:", "question, solution", "data.columns.prompt"),
    "null": jsonl("null.jsonl", "null.jsonl:4", "answer must be", "got null"),
    "NaN": jsonl("nan.jsonl", "nan.jsonl:4", "answer must be", "got NaN"),
    "messages": jsonl("words.jsonl", "words.jsonl:1", '"role"'),
    "of demonstrations": Mistake(
        "policy-trainer sft --model model --device cpu --run-dir run --data.path other-columns.jsonl",
        ("other-columns.jsonl:1", '"completion"'),
    ),
    "of pairs": Mistake(
        "policy-trainer reward-model --model model --device cpu --run-dir run --data.path other-columns.jsonl",
        ("data.path: other-columns.jsonl", "question, solution", '"chosen"'),
    ),
    "no demonstrations": Mistake("policy-trainer sft --model model", ("data.path: is required", "--data.path")),
    "own task": train("--model model --task nowhere:Task", "task:", "No module named 'nowhere'"),
    "own task that raises": train("--model model --task own:Raises", "task:", "LookupError: no such file", "own.py"),
    "own task that raises later": Mistake(
        f"{EVAL} --task own:Late", ("task:", "eval_problems() raised LookupError: no such row", "own.py")
    ),
    "own task without members": train("--model model --task own:Bare", "task:", "eval_problems", "docs/tasks.md"),
}
REWARDS = {
    "misspelt": reward("acuracy", "did you mean accuracy?"),
    "no module": reward("nowhere:f", "No module named 'nowhere'"),
    "no function": reward("mine:f", "no attribute 'f'"),
    "no syntax": reward("damaged:f", "damaged.py, line 1"),
    "raises": reward("raising:f", "RuntimeError: no key"),
    "no function at all": reward("mine:number", "not a function"),
    "by position": reward("mine:by_position", "by name"),
    "unknown argument": Mistake(f"{EVAL} --rewards mine:by_colour", ("rewards:", "needs colour", "available: answer")),
    "raises each time": Mistake(
        f"{EVAL} --rewards mine:raising", ("rewards:", "failed on every completion", "other --rewards"), status=1
    ),
    "model without a path": train("--model model --rewards model", "judging.model.path", "directory or hub id"),
}
SERVERS = {
    "none": Mistake("ref-server ping --url http://127.0.0.1:{port}", ("no server answers",), status=1),
    "none to list": Mistake(
        "ref-server queue ls --url http://127.0.0.1:{port}", ("no server answers", "ref-server serve"), status=1
    ),
    "no model": Mistake("ref-server serve", ("--model", "--no-model")),
    "tokens": Mistake("ref-server serve --model model --token-file none.txt", ("token_file:", "none.txt")),
}
# {url}: a server without a model; {data}: its directory; {tokens}: files of its tokens; {web}: no reference server.
TOKENS = {"upload": "an-uploaders-token-0123456789", "train": "a-trainers-token-0123456789"}
MOST_TOKENS = 300
neighbour = (
    "policy-trainer train --model model --device cpu --threads 1 --run-dir run --loss.beta 0 "
    "--sampling.max-completion-length 40 --data.max-prompt-length 20"
)
LIVING = {
    "port": Mistake(
        "ref-server serve --no-model --data-dir run --port {taken}", ("port {taken}: address already in use", "--port"),
        status=1,
    ),
    "directory": Mistake(
        "ref-server serve --no-model --port {port} --data-dir {data}", ("another process holds", "another --data-dir"),
        status=1,
    ),
    "role": Mistake(
        neighbour + " --server {url} --token-file {tokens}/upload",
        ("a token of role train", "of role upload", "--token-file"), status=1,
    ),
    "role to look": Mistake(
        "ref-server queue ls --url {url} --token-file {tokens}/upload", ("a token of role train", "--token-file"),
        status=1,
    ),
    "no token": Mistake(neighbour + " --server {url}", ("a token is required", "--token-file"), status=1),
    "another kind": Mistake(
        neighbour + " --server {web}", ("server: the server at {web} is not a reference server", "`ref-server serve`"),
        status=1,
    ),
    "group": Mistake(
        neighbour + " --server {url} --token-file {tokens}/train",
        ("sampling.num_generations, sampling.max_completion_length", str(MOST_TOKENS), "--max-batch-tokens 340"),
    ),
}  # fmt: skip
ALL = {
    f"{kind}: {name}": mistake
    for kind, mistakes in {
        "names": NAMES, "values": VALUES, "files": SETTINGS_FILES, "models": MODELS, "data": DATA, "rewards": REWARDS,
        "servers": SERVERS,
    }.items()
    for name, mistake in mistakes.items()
}  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, damaged copies of it, and the files; the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # modules of the user's are imported from here
    (tmp_path / "model").symlink_to(random_model)
    (tmp_path / "empty").mkdir()
    for name, without in (("weightless", "model.safetensors"), ("speechless", "tokenizer.json"), ("damaged", "")):
        copytree(random_model, tmp_path / name)
        if without:
            (tmp_path / name / without).unlink()
    (tmp_path / "damaged" / "config.json").write_text("{oops")
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


Run = Callable[[Mistake], tuple[int, list[str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command as the shell would. Returns its status, and the lines of its error."""
    monkeypatch.setattr("policy_trainer.cli.status.configure_logs", lambda: None)  # they are the whole process's
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def run(mistake: Mistake) -> tuple[int, list[str]]:
        program, *arguments = mistake.command.split()
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setenv(*mistake.environment)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            import_module(f"{program.replace('-', '_')}.__main__").main()
        return int(ended.value.code or 0), _error(program, capfd.readouterr().err)

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)


def _error(program: str, output: str) -> list[str]:
    """The lines from the one on that begins with the program's name; all of them if none does."""
    lines = output.splitlines()
    return lines[next((i for i, line in enumerate(lines) if line.startswith((program, "usage"))), 0) :]


def run_apart(mistake: Mistake) -> tuple[int, list[str]]:
    """In a process of its own: `serve` changes the logs, the signals and the limits of its process."""
    program, *arguments = mistake.command.split()
    command = [sys.executable, "-m", program.replace("-", "_"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return ended.returncode, _error(program, ended.stderr)


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A reference server with tokens and a web server that is none, and where they are."""
    directory = tmp_path_factory.mktemp("living")
    for role, token in TOKENS.items():
        (directory / role).write_text(token)
        (directory / role).chmod(0o600)
    tokens = directory / "tokens"
    tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    tokens.chmod(0o600)
    web = free_port()
    server = Server(None, directory, "--token-file", str(tokens), "--max-batch-tokens", str(MOST_TOKENS))
    other = Process("http.server", str(web), "--bind", "127.0.0.1", log=directory / "web.log")
    try:
        for name, process in ((server.url, server), (f"http://127.0.0.1:{web}", other)):
            until(lambda name=name: answers(name), f"{name} to answer", process)
        yield {
            "url": server.url, "taken": server.port, "data": server.data, "tokens": directory,
            "web": f"http://127.0.0.1:{web}",
        }  # fmt: skip
    finally:
        server.kill()
        other.kill()


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/livez").status_code)
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("mistake", ALL.values(), ids=ALL)
def test_is_answered_with_field_and_remedy(mistake: Mistake, run: Run, workplace: Path) -> None:
    check(replace(mistake, command=mistake.command.format(port=free_port())), run, workplace)
    assert not (workplace / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("mistake", LIVING.values(), ids=LIVING)
def test_is_answered_beside_a_living_server(
    mistake: Mistake, run: Run, workplace: Path, living: dict[str, Any]
) -> None:
    places = {**living, "port": free_port()}
    words = tuple(word.format(**places) for word in mistake.words)
    known = replace(mistake, command=mistake.command.format(**places), words=words)
    check(known, run_apart if " serve " in known.command else run, workplace)
    assert not steps_of(workplace / "run")


def check(mistake: Mistake, run: Run, workplace: Path) -> None:
    status, lines = run(mistake)
    output = "\n".join(lines)
    assert status == mistake.status, output
    assert 1 <= len(lines) <= MOST_LINES and "Traceback" not in output, output
    for word in mistake.words:
        assert word in output
    assert not processes_of(workplace)
    assert not (workplace / "run" / "checkpoints").exists()
