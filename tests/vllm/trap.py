"""A worker extension that leaves the LM head as it is: what vLLM does by itself on a CPU."""


class UnpackedHead:
    def pack_head(self) -> None:
        pass
