"""A substitute for the Hub: the tiny models and the datasets of TRL's tests, made locally from a checkout of TRL.

TRL's own scripts (`scripts/generate_tiny_models`) build the models. What they would read from the Hub is built from
`sources.py`; what they would upload is saved in a directory.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

from shared.atomic_files import atomic_directory
from tests.trl_suite.sources import SOURCES

ORGANIZATION = "trl-internal-testing"
_SCRIPTS = "scripts.generate_tiny_models"
# Functions that use the Hub or check transformers' version, and a smoke test that some models fail in other versions.
_LEFT_OUT = ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test")


def build(checkout: Path, hub: Path) -> dict[str, str]:
    """Makes what is missing under `hub`. Returns the models that could not be made, with the reason."""
    home = hub / ORGANIZATION
    needed = set(re.findall(rf'"{ORGANIZATION}/([^"]+)"', (checkout / "tests" / "test_grpo_trainer.py").read_text()))
    scripts = {name: module for name, module in _scripts(checkout) if name in needed}
    failed = dict.fromkeys(needed - {*scripts, *_DATASETS}, "no script makes it")
    with _stand_in(checkout, home):
        for name, module in scripts.items():
            if not (home / name).exists():
                try:
                    importlib.import_module(module)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"
    for name, configs in _DATASETS.items():
        if not (home / name).exists():
            _dataset(home / name, configs)
    return failed


def _scripts(checkout: Path) -> Iterator[tuple[str, str]]:
    """The name of each tiny model, and the module that makes it."""
    for file in sorted(checkout.glob(f"{_SCRIPTS.replace('.', '/')}/for_*/*.py")):
        text = file.read_text()
        kind = re.search(r"^model = (\w+)\(", text, re.MULTILINE)
        ends = re.search(r"^push_to_hub\(model, \w+, \w+((?:, \"[^\"]+\")+)\)", text, re.MULTILINE)
        if kind and ends:
            prefix, *suffix = re.findall(r'"([^"]+)"', ends[1])
            yield "-".join((prefix, kind[1], *suffix)), f"{_SCRIPTS}.{file.parent.name}.{file.stem}"


@contextmanager
def _stand_in(checkout: Path, home: Path) -> Iterator[None]:
    def save(model: Any, tokenizer: Any, generation_config: Any, *ends: str) -> None:
        prefix, *suffix = ends
        with atomic_directory(home / "-".join((prefix, type(model).__name__, *suffix))) as folder:
            for part in (model, tokenizer, generation_config):
                if part is not None:
                    part.save_pretrained(folder)

    with patch.object(sys, "path", [str(checkout), *sys.path]), ExitStack() as stack:
        common = importlib.import_module(f"{_SCRIPTS}._common")
        for name in _LEFT_OUT:
            stack.enter_context(patch.object(common, name, lambda *_: None))
        stack.enter_context(patch.object(common, "push_to_hub", save))
        for read, made in (
            (AutoTokenizer, lambda name, **_: SOURCES[name].tokenizer()),
            (AutoConfig, lambda name, **changes: SOURCES[name].config(**changes)),
            (AutoProcessor, lambda name, **_: SOURCES[name].processor()),
            (GenerationConfig, lambda name, **_: SOURCES[name].generation_config()),
        ):
            stack.enter_context(patch.object(read, "from_pretrained", made))
        yield


def _dataset(folder: Path, configs: dict[str, Callable[[int], dict[str, Any]]]) -> None:
    with atomic_directory(folder) as new:
        card = ["---", "configs:"]
        for config, row in configs.items():
            card += [f"- config_name: {config}", "  data_files:"]
            for split, size in (("train", 17), ("test", 2)):
                Dataset.from_list([row(number) for number in range(size)]).to_parquet(new / f"{config}-{split}.parquet")
                card.append(f"  - {{split: {split}, path: {config}-{split}.parquet}}")
        (new / "README.md").write_text("\n".join((*card, "---", "")))


def _text(number: int) -> str:
    return ("Two and two are", "The sky is", "A word for cold is", "After Monday comes", "Water is")[number % 5]


def _says(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}]}


def _picture(number: int) -> Image.Image:
    return Image.linear_gradient("L").resize((32 + 4 * (number % 3), 32)).rotate(90 * number).convert("RGB")


# The numbers of rows, the columns and the forms are those of TRL's datasets; texts and pictures are different.
_TALK = "conversational_prompt_only"
_DATASETS: dict[str, dict[str, Callable[[int], dict[str, Any]]]] = {
    "zen": {"standard_prompt_only": lambda n: {"prompt": _text(n)}, _TALK: lambda n: _says(_text(n))},
    "zen-image": {_TALK: lambda n: {**_says("What is in the picture?"), "image": _picture(n)}},
    "zen-multi-image": {
        _TALK: lambda n: {**_says("What is in the pictures?"), "images": [_picture(n + k) for k in range(1 + n % 2)]}
    },
}
