"""The routes, one file for each resource. A route turns HTTP into a call of the service, and the result into HTTP."""
