"""Numbers for whoever watches the server."""
