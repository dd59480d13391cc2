"""LoRA's adapters on disk, and weights that have taken them up."""
