"""Texts of tools and environments in prompts, and users' rows: what looks like a control token in them is text."""

import re
from collections.abc import Iterable, Mapping
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str] | None = None) -> None:
        """tokens: those to keep out; None for all that were added to the vocabulary, and the place of a picture."""
        self._tokenizer = tokenizer
        self._tokens = tokens

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        """The first character of each token, so that tokens which overlap are all found."""
        vocabulary: Any = self._tokenizer.get_added_vocab  # transformers gives it no usable type
        tokens = {PLACEHOLDER, *vocabulary()} if self._tokens is None else set(self._tokens)
        longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        return re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'})).", re.DOTALL)

    def first_token(self, text: str) -> str | None:
        """The first token in a text that is to be kept out; None without any."""
        return found[1] if (found := self._starts.search(text)) else None

    def separated(self, text: str) -> str:
        """The text, in which nothing is one of the tokenizer's added tokens or the place of a picture. Lone surrogates,
        which have no encoding, become question marks."""
        clean = text.replace(SEPARATOR, "").encode(errors="replace").decode()
        return self.cut(clean)

    def cut(self, text: str) -> str:
        """The text with a separator inside each token, behind the first character; earlier separators stay."""
        return self._starts.sub(rf"\g<0>{SEPARATOR}", text)

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
