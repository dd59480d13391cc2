"""The dashboard: a page that looks at the server by its API: a leaf, which can be deleted."""
