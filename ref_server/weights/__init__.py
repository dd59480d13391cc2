"""Published weights on the server's disk: uploaded file by file, visible in one rename, removed later."""
