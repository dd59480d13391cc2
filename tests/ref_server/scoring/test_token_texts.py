"""The text of each token by itself, with two common kinds of tokenizers."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ref_server.scoring.token_texts import token_texts


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's: blanks as ▁, other bytes as <0x..>."""
    words = ["<unk>", "▁the", "cat", "▁", "<0xE2>", "<0x82>", "<0xAC>", "t", "h", "e"]
    model = models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    plain = Tokenizer(model)
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's and Qwen's; a token of a character and a half among them."""
    words = ["Ġthe", "â", "Ĥ", "¬", "âĤ¬", "cat", "aâĤ", "Ċ"]
    plain = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "texts"),
    [
        (byte_level(), [0, 5, 4, 7], [" the", "cat", "€", "\n"]),
        (byte_level(), [1, 2, 3, 6], ["\\xe2", "\\x82", "\\xac", "a\\xe2\\x82"]),
        (sentence_piece(), [1, 2, 1], [" the", "cat", " the"]),
        (sentence_piece(), [4, 5, 6], ["<0xE2>", "<0x82>", "<0xAC>"]),
        (sentence_piece(), [], []),
    ],
)
def test_no_text_is_made_up(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: Sequence[str]) -> None:
    assert token_texts(tokenizer.decode, tokenizer.convert_ids_to_tokens, ids) == texts
