"""The reference server: scores per-token log-probs with a frozen model and queues the generated batches."""

from importlib.util import find_spec
from pathlib import Path

# A script's own file or folder of this name comes before ours, whose errors would then say nothing about it.
_shared = find_spec("shared")
if _shared is not None and _shared.origin != str(Path(__file__).parents[1] / "shared" / "__init__.py"):
    raise ImportError(f"Tandem's package `shared` is hidden by {_shared.origin}: give that another name")
