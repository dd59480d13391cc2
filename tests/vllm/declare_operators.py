"""Makes torchvision importable where its compiled operators do not load, as those for CUDA do not on a CPU.

torchvision describes them to PyTorch as soon as it is imported. Pictures are resized without them.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_DECLARED = """
_declared = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _declared.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    spec = find_spec("torchvision")  # does not import it
    assert spec is not None and spec.origin is not None
    try:
        import_module("torchvision")
    except RuntimeError:
        path = Path(spec.origin)
        text = path.read_text()
        assert "import torch\n" in text
        path.write_text(text.replace("import torch\n", f"import torch\n{_DECLARED}\n", 1))


if __name__ == "__main__":
    main()
