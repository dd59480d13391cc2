"""The commands that speak to a running server over HTTP: what they share, `ref-server ping` and `ref-server score`."""
