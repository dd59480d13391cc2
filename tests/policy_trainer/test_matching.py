"""A policy and a reference that speak of other tokens are refused."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.matching import check_models_match
from shared.models import tokenizer_fingerprint
from shared.refusal import Refused


def test_the_same_vocabulary_and_tokenizer(make_tiny: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny(vocabulary=len(tokenizer))
    reference = {
        "name": "ref",
        "vocabulary_size": len(tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }
    check_models_match(reference, model, tokenizer, "mine")
    with pytest.raises(Refused, match=r"^model: mine has a vocabulary of 265 tokens.* ref has 266"):
        check_models_match({**reference, "vocabulary_size": 266}, model, tokenizer, "mine")
    with pytest.raises(Refused, match=r"^model: the tokenizer of mine is not that of .* ref"):
        check_models_match({**reference, "tokenizer_fingerprint": "other"}, model, tokenizer, "mine")
