"""Log-probs of completion tokens. The server and the trainer share this code, with its shift by one and its LM head.

Because both run the same code, the KL divergence between an unchanged policy and its reference is 0.

    choice.py     chooses the fastest forward that agrees with a plain forward of the model
    packed.py     whole groups in one sequence `[prompt | c_1 | … | c_G | prompt …]`: each prompt is computed once
    padded.py     right-padded rows of similar length, correct for every architecture
    forward.py    what a forward is: the protocol, and the base class of those that use the tiled head
    layout.py     positions of the groups' tokens in the packed sequence
    attention.py  packed attention as a function of transformers' attention interface
    stacked.py    packed attention by SDPA, on any device
    varlen.py     packed attention by PyTorch's varlen kernel, on CUDA
    forked.py     layers with a state, such as linear attention: completions begin with copies of their prompt's,
                  or are computed with it row by row
    vision.py     images in prompts: what each family's forward takes, and positions of their tokens
    head.py       LM head and log-softmax in tiles, so that (C, V) logits are never in memory as a whole
"""

from shared.logprobs.choice import choose_forward, may_pack, self_test_difference, slowed_by
from shared.logprobs.forward import LogprobForward, ServingForward
from shared.logprobs.packed import PackedForward
from shared.logprobs.padded import PaddedForward, PlainForward
from shared.logprobs.vision import Vision, language_model, placeholders_of, takes_images, vision_of
