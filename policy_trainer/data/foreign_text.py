"""Text from tools and environments in prompts: nothing in it becomes a control token."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from policy_trainer.data.pictures import PLACEHOLDER
from policy_trainer.data.rendering import encode

# A Unicode noncharacter, which no text contains. Inserted into the text of an added token, it keeps the tokenizer from
# recognising the token; the pieces around it are encoded separately.
SEPARATOR = "\ufdd0"


class ForeignText:
    """Inserts separators into text from outside the model, and encodes the result."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> re.Pattern[str]:
        vocabulary: Any = self._tokenizer.get_added_vocab  # transformers does not type it usefully
        tokens = {PLACEHOLDER, *(token for token in vocabulary() if len(token) > 1)}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def separated(self, text: str) -> str:
        """The text, with separators so that nothing in it is an added token of the tokenizer or a picture placeholder.
        Lone surrogates, which cannot be encoded, become question marks."""
        clean = text.replace(SEPARATOR, "").encode(errors="replace").decode()
        return self._added.sub(lambda match: f"{match[0][0]}{SEPARATOR}{match[0][1:]}", clean)

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
