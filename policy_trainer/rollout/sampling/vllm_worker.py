"""A method for vLLM's workers: `--worker-extension-cls` mixes this class into vLLM's worker class.

The file imports nothing of Tandem, so that a server on another machine needs only this file.
"""

from typing import Any


class PackedHead:
    """On a CPU vLLM computes with a packed copy of the LM head's weights. If the head is tied to the embedding,
    reloading the weights does not pack it again, and log-probs would be those of the old head."""

    def pack_head(self: Any) -> None:
        """Call it after `reload_weights`. `self` is vLLM's worker."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
