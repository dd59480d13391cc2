"""HTTP in front of the service: the application, its routes, the gate that each request passes, uvicorn."""
