"""The server without HTTP. `ref_server.http` turns requests into calls of `Service`, and its results into responses."""
