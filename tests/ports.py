"""Ports for servers of tests."""

import socket


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
