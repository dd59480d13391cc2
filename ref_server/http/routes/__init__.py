"""The routes, one file a noun: HTTP in, calls of the service, HTTP out, and nothing else."""
