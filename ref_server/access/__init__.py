"""Access control without HTTP: tokens and roles, host names, certificates."""
