"""docs/settings-reference.md says what the code says."""

import pytest

from tools.settings_page import PAGE, page


def test_the_page_is_as_the_code_writes_it() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python -m tools.settings_page"


@pytest.mark.parametrize(
    "row",
    [
        "| `model` | `NAME` |  | Directory or Hub id of a Hugging Face causal LM. **Required.** |",
        "| `loss.beta` | `X` |",
        "| `queue.max_batches` | `N` | `10000` |",
    ],
)
def test_what_a_row_says(row: str) -> None:
    assert f"\n{row}" in page()
