"""TRL's own tests of GRPOTrainer, run on `policy_trainer.trl`: `make test-trl TRL_TESTS=CHECKOUT_OF_TRL`.

TRL's test file is not part of this repository. A copy with one line changed, the import, runs in a directory where the
Hub's names are paths to models and datasets that `hub.py` makes. Exits with 1 if a test fails that
`expected_failures.txt` does not name, or if a test that it names passes. Each of its lines has a test and the reason:
`TestGRPOTrainer::test_train  # the reason`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.trl_suite.hub import build

EXPECTED = Path(__file__).with_name("expected_failures.txt")
# On a CPU, scripts for TRL set use_cpu=True, which TRL's tests omit. The checkout may be of another version than the
# installed package: what the package lacks counts as unavailable.
_CONFTEST = """
import os
from importlib import import_module

import_module("transformers.training_args").is_torch_bf16_gpu_available = lambda: True
vars(import_module("trl.import_utils")).setdefault("is_joblib_available", lambda: False)


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else crash.message if crash else ""
        with open(os.environ["RESULTS"], "a") as file:
            print(report.nodeid.partition("::")[2], report.outcome, *text.splitlines()[:1], sep="\\t", file=file)
"""
_IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"


def main() -> int:
    arguments = _arguments()
    checkout, hub = arguments.checkout.resolve(), arguments.hub.resolve()
    for name, reason in sorted(build(checkout, hub).items()):
        print(f"not made: {name}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        results = _run(_copy(checkout, Path(folder), ours=not arguments.trl), hub, arguments)
    print(", ".join(f"{number} {kind}" for kind, number in Counter(kind for kind, _ in results.values()).items()))
    if arguments.tsv:
        arguments.tsv.write_text("".join(f"{name}\t{kind}\t{text}\n" for name, (kind, text) in sorted(results.items())))
    return 0 if arguments.trl or arguments.k else _compared(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL, with tests/ and scripts/")
    parser.add_argument("--hub", type=Path, default=Path(".venv-trl", "hub"), help="where its models are made, once")
    parser.add_argument("--trl", action="store_true", help="run TRL itself, for comparison")
    parser.add_argument("-k", help="as pytest's -k")
    parser.add_argument("--tsv", type=Path, help="write every test's result there")
    return parser.parse_args()


def _copy(checkout: Path, folder: Path, *, ours: bool) -> Path:
    """TRL's file with one line changed, and what it imports."""
    tests = folder / "trl_tests"
    tests.mkdir()
    for name in ("__init__.py", "testing_utils.py", "test_grpo_trainer.py"):
        text = (checkout / "tests" / name).read_text()
        changed = text.replace(_IMPORT, _IMPORT.replace("from trl", "from policy_trainer.trl"))
        (tests / name).write_text(changed if ours else text)
    (tests / "conftest.py").write_text(_CONFTEST)
    return tests / "test_grpo_trainer.py"


def _run(file: Path, hub: Path, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Each test's name -> (passed, failed or skipped; the first line of its error).

    In the hub's directory, the Hub's names are paths. If pytest dies, the results so far are kept.
    """
    written = file.with_name("results.tsv")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(file)]
    chosen = ["-k", arguments.k] if arguments.k else []
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "RESULTS": str(written)}
    command += [*chosen, f"--basetemp={file.with_name('runs')}", "--timeout=600"]
    code = subprocess.run(command, cwd=hub, env=environment).returncode
    if code not in (0, 1):
        print(f"pytest ended with {code}: some tests may not have run")
    results = {}
    for line in written.read_text().splitlines() if written.exists() else ():
        name, kind, *text = line.split("\t", 2)
        results[name] = (kind, "".join(text))
    return results


def _compared(results: dict[str, tuple[str, str]]) -> int:
    expected = {name for name, reason in (line.split("  # ") for line in EXPECTED.read_text().splitlines()) if reason}
    failed = {name for name, (kind, _) in results.items() if kind == "failed"}
    for name in sorted(failed - expected):
        print(f"failed, and {EXPECTED.name} does not name it: {name}: {results[name][1]}")
    for name in sorted(expected - failed):
        print(f"{EXPECTED.name} names it, and it did not fail: {name}")
    return int(failed != expected)


if __name__ == "__main__":
    sys.exit(main())
