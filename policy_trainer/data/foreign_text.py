"""Texts of tools and environments in prompts: nothing in them becomes a control token."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from policy_trainer.data.pictures import PLACEHOLDER
from policy_trainer.data.rendering import encode

# A noncharacter of Unicode, which no text has. It stands within an added token's text, so that the tokenizer does not
# take it for the token; the text is encoded in the pieces around it.
SEPARATOR = "\ufdd0"


class ForeignText:
    """Separates the texts of others, and encodes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> re.Pattern[str]:
        vocabulary: Any = self._tokenizer.get_added_vocab  # transformers gives it no usable type
        tokens = {PLACEHOLDER, *(token for token in vocabulary() if len(token) > 1)}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def separated(self, text: str) -> str:
        """The text, in which nothing is one of the tokenizer's added tokens or the place of a picture. Lone surrogates,
        which have no encoding, become question marks."""
        clean = text.replace(SEPARATOR, "").encode(errors="replace").decode()
        return self._added.sub(lambda match: f"{match[0][0]}{SEPARATOR}{match[0][1:]}", clean)

    def separated_json(self, value: Any) -> Any:
        """The same for all texts of a JSON value, such as a tool's schema."""
        if isinstance(value, str):
            return self.separated(value)
        if isinstance(value, Mapping):
            return {self.separated(str(key)): self.separated_json(item) for key, item in value.items()}
        return [*map(self.separated_json, value)] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, front: bool = False) -> list[int]:
        """The ids of a text with separated parts. front: with what the tokenizer puts in front of every text."""
        first, *rest = text.split(SEPARATOR)
        ids = encode(self._tokenizer, first, front=front)
        return [*ids, *(token for piece in rest for token in encode(self._tokenizer, piece, front=False))]
