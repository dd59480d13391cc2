"""Whether a policy and the server's reference model speak of the same tokens."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shared.logprobs import embedding_rows
from shared.models import tokenizer_fingerprint
from shared.refusal import Refused


def check_models_match(
    reference: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises Refused unless vocabulary and tokenizer are the reference's: its log-probs would mean other tokens."""
    rows = embedding_rows(model)
    if rows != reference["vocabulary_size"]:
        raise Refused(
            f"model: {name} has a vocabulary of {rows} tokens, the server's reference {reference['name']} has "
            f"{reference['vocabulary_size']}; start ref-server with the model that this policy began as"
        )
    if tokenizer_fingerprint(tokenizer) != reference["tokenizer_fingerprint"]:
        raise Refused(
            f"model: the tokenizer of {name} is not that of the server's reference {reference['name']}; "
            "start ref-server with the model that this policy began as"
        )
