"""A key-value cache that grows in place: a decoding step does not copy cached tokens."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

# Free tokens of a new cache. A full cache grows by half.
_FREE_TOKENS = 32


class GrowableLayer(CacheLayerMixin):
    """Keys and values of one layer, (B, K, T, D), with room for more tokens.

    before: number of earlier tokens whose keys and values are kept elsewhere.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, before: int = 0) -> None:
        super().__init__()
        self._before, self._length = before, keys.shape[2]
        self._keys, self._values = (_with_room(part, part.shape[2] + _FREE_TOKENS) for part in (keys, values))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the next token's (B, K, 1, D). Returns all as (B K, T, D), as decoding attention takes them."""
        if self._length == self._keys.shape[2]:
            room = self._length + self._length // 2
            self._keys, self._values = _with_room(self._keys, room), _with_room(self._values, room)
        self._keys[:, :, self._length] = key_states[:, :, 0]
        self._values[:, :, self._length] = value_states[:, :, 0]
        self._length += 1
        return self._keys.flatten(0, 1)[:, : self._length], self._values.flatten(0, 1)[:, : self._length]

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """Copies the rows at `source` to the rows `target`, then keeps the first `count` rows."""
        for part in (self._keys, self._values):
            part[target, :, : self._length] = part[source, :, : self._length]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def get_seq_length(self) -> int:
        return self._before + self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # Its name before transformers 5.14, where it is abstract, too.
    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The constructor has allocated everything."""


def _with_room(part: Tensor, tokens: int) -> Tensor:
    """The same keys or values in a tensor with room for so many tokens."""
    rows, heads, length, width = part.shape
    grown = part.new_empty(rows, heads, tokens, width)
    grown[:, :, :length] = part
    return grown
