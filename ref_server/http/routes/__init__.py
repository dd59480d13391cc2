"""The routes, one file for each noun. A route turns HTTP into a call of the service, and the result into HTTP."""
