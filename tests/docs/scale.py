"""Which commands of the pages are not run, with reasons, and which are run with smaller settings."""

import re
from collections.abc import Mapping

from tests.docs.pages import PLACEHOLDER, Command

# Pattern in a command -> where it is tried instead, or why not.
ELSEWHERE: Mapping[str, str] = {
    r"^make ": "continuous integration runs it",
    r"docker compose": "make docker-test",
    r"(?i)vllm": "make test-vllm",
    r"pip (un)?install": "would change the environment that runs this",
    r"\.example\b|://gpu1": "the reader's own machines",
    r"--task (gsm8k|math)\b(?!.*--data\.path)|--preset simple-grpo": "downloads a dataset",
    r"--device-map": "needs several GPUs",
    rf"{PLACEHOLDER}|\bID\b|\$ID|--model M\b": "the reader's own values",
    r"ref-server queue (export|import)": "tests/ref_server/cli, with stores that hold something",
    r"curl -s -K -": "tests/integration/test_workers.py, while the run's server is there",
    r"tests\.bench\.|tests\.chaos": "a benchmark",
}
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
    ("policy-trainer", "eval"): {"--evaluation.problems": "4", "--sampling.max-completion-length": "16"},
}
# What a run of two steps does not have.
_STANDS_FOR = {"step-00000400": "step-00000010"}
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
    return [word.rpartition("/")[2] for word in command.words[:2]] == ["ref-server", "serve"]


def waits_for_workers(command: Command) -> bool:
    """A trainer whose workers later commands start, in another terminal."""
    return "--rollout external" in command.text
