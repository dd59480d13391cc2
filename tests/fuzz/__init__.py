"""The decoders of what comes from outside, given what nobody would send."""
