"""The server with slow clients, with ten times the load it can take, and over a long time."""
