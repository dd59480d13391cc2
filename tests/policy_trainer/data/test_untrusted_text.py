"""What looks like a token in the texts of others is text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.data.untrusted_text import SEPARATOR, UntrustedText

TOKENS = ["ab", "bc", "aa", "aaa", "\n\n", "\n\n\n", "<x>", "x><"]
TOKENIZER = make_tokenizer()
TOKENIZER.add_tokens(TOKENS)
ADDED = {TOKENIZER.get_vocab()[token] for token in TOKENS}


@given(text=st.text("abc\n<x>", max_size=12))
def test_no_token_survives_even_where_tokens_overlap(text: str) -> None:
    foreign = UntrustedText(TOKENIZER)
    separated = foreign.separated(text)
    assert separated.replace(SEPARATOR, "") == text
    assert not ADDED & {*foreign.encode(separated)}


@given(text=st.text("abc<x>", max_size=12))
def test_chosen_tokens_are_kept_out_and_earlier_separators_stay(text: str) -> None:
    foreign, before = UntrustedText(TOKENIZER, ["bc", "<x>"]), f"a{SEPARATOR}b{text}"
    cut = foreign.cut(before)
    assert cut.startswith(f"a{SEPARATOR}b") and cut.replace(SEPARATOR, "") == before.replace(SEPARATOR, "")
    assert not any(token in piece for token in ("bc", "<x>") for piece in cut.split(SEPARATOR))


def test_without_tokens_nothing_is_cut() -> None:
    assert UntrustedText(TOKENIZER, ()).cut("abc <x>") == "abc <x>"


@pytest.mark.parametrize(
    ("text", "token"), [("an <x>, abc", "<x>"), ("aaaa", "aaa"), ("a <image>", "<image>"), ("a b", None)]
)
def test_the_first_token(text: str, token: str | None) -> None:
    assert UntrustedText(TOKENIZER).first_token(text) == token
