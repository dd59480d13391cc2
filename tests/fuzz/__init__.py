"""Fuzzing of the decoders of uploads."""
