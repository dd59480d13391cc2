"""docs/models.md lists what a tiny model of every causal architecture of transformers does."""

import pytest
import transformers

from tests.tiny_models import ARCHITECTURES
from tools.models_page import COMPARED, LEFT_OUT, PAGE, listed, on_the_page, verdict

LISTED = listed(PAGE.read_text(encoding="utf-8"))
# One of each kind: decoding attention, windows, some and only recurrent layers, latent attention, two
# attentions in one, a cache class of its own, and one that is refused.
FAST = (
    *("qwen2", "gemma2", "qwen3_5", "lfm2", "mamba", "nemotron_h", "deepseek_v3", "diffllama", "minimax"),
    "openai-gpt",
)
pytestmark = pytest.mark.skipif(
    transformers.__version__ not in PAGE.read_text(encoding="utf-8"), reason="the page is about another transformers"
)


def test_every_architecture_has_a_verdict_or_a_reason() -> None:
    assert sorted([*LISTED, *LEFT_OUT]) == sorted(ARCHITECTURES), "run: .venv/bin/python -m tools.models_page"


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in COMPARED]
)
@pytest.mark.filterwarnings("ignore")  # transformers warns about sizes that no model has
def test_the_verdict_is_as_listed(architecture: str) -> None:
    assert on_the_page(verdict(architecture)) == LISTED[architecture], "run: .venv/bin/python -m tools.models_page"
