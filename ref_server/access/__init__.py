"""Who may use the server, without HTTP: tokens and roles, the names it is asked by, the files behind HTTPS."""
