"""Log-probs of completion tokens: the only shift-by-one and the only LM-head code, used by the server and the trainer.

Because both sides run this same code, the KL between a policy that has not moved and its reference is 0.

    choice.py     looks at the model, tries, and compares with the plainest forward there is before it trusts any
    packed.py     whole groups in one sequence `[prompt | c_1 | … | c_G | prompt …]`: each prompt is computed once
    padded.py     right-padded rows of about one length, right for every architecture
    hidden.py     what both have in common
    layout.py     where the tokens of groups stand in the packed sequence
    attention.py  each completion attends to its prompt and itself, through transformers' attention interface
    head.py       LM head and log-softmax in tiles, so that (C, V) logits never exist; its backward recomputes them
"""

from shared.logprobs.choice import attends_fully, choose_forward, embedding_rows, self_test_difference
from shared.logprobs.interface import LogprobForward
from shared.logprobs.packed import PackedForward
from shared.logprobs.padded import PaddedForward, PlainForward

__all__ = [
    "LogprobForward",
    "PackedForward",
    "PaddedForward",
    "PlainForward",
    "attends_fully",
    "choose_forward",
    "embedding_rows",
    "self_test_difference",
]
