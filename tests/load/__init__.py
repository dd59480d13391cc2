"""How the server does under slow clients, under ten times the load it can take, and over a long time."""
