"""Turns a GGUF file into a model directory, which every `--model` takes: its weights unpacked, its tokenizer and chat
template. The file may be cut into parts, given in their order. Needs `pip install gguf`.

    python examples/import_gguf.py model.gguf --out model
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "model.gguf"


def import_gguf(parts: Sequence[Path], out: Path, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / NAME).open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        AutoTokenizer.from_pretrained(folder, gguf_file=NAME).save_pretrained(out)
        # Newer versions of transformers keep the weights packed by default.
        packs = hasattr(transformers, "GgufConfig")
        unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packs else {}
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=dtype, **unpacked)
        model.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", type=Path, metavar="FILE", help="the GGUF file, or all its parts in order")
    parser.add_argument("--out", required=True, type=Path, help="directory to write the model to")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    arguments = parser.parse_args()
    import_gguf(arguments.parts, arguments.out, arguments.dtype)
