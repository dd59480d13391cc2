"""The command `ref-server queue`: looks after the queue of a running server, over HTTP."""
