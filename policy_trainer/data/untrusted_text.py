"""Text from tools, environments and users' rows in prompts: what looks like a control token in it is text."""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from policy_trainer.data.pictures import PLACEHOLDER
from policy_trainer.data.rendering import encode

# A Unicode noncharacter, which no text contains. Inserted into the text of an added token, it keeps the tokenizer from
# recognising the token; the pieces around it are encoded separately.
SEPARATOR = "\ufdd0"


class UntrustedText:
    """Inserts separators into text from outside the model, and encodes the result."""

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
        match = self._starts.search(text)
        return match[1] if match else None

    def separated(self, text: str) -> str:
        """The text, with separators so that nothing in it is an added token of the tokenizer or a picture placeholder.
        Lone surrogates, which cannot be encoded, become question marks."""
        clean = text.replace(SEPARATOR, "").encode(errors="replace").decode()
        return self.cut(clean)

    def cut(self, text: str) -> str:
        """The text with a separator inside each token, behind the first character; earlier separators stay."""
        return self._starts.sub(rf"\g<0>{SEPARATOR}", text)

    def separated_json(self, value: Any) -> Any:
        """Does the same for every string in a JSON value, such as a tool's schema."""
        if isinstance(value, str):
            return self.separated(value)
        if isinstance(value, Mapping):
            return {self.separated(str(key)): self.separated_json(item) for key, item in value.items()}
        return [*map(self.separated_json, value)] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, front: bool = False) -> list[int]:
        """The token ids of a text with separators. front: whether to add what the tokenizer prepends to every text."""
        first, *rest = text.split(SEPARATOR)
        ids = encode(self._tokenizer, first, front=front)
        return [*ids, *(token for piece in rest for token in encode(self._tokenizer, piece, front=False))]
