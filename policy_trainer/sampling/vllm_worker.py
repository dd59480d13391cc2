"""What vLLM's workers learn from us. `--worker-extension-cls` mixes this class into vLLM's own.

It imports nothing, so that a server needs this file alone, on any machine.
"""

from typing import Any


class PackedHead:
    """On a CPU vLLM computes with a packed copy of the LM head's weights. If they are the embedding's, too, its reload
    does not pack them again, and log-probs would be those of the old head."""

    def pack_head(self: Any) -> None:
        """Call it after `reload_weights`. `self` is vLLM's worker."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
