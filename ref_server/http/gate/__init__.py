"""Every request passes here before a route sees it: id and log, checks and limits, load shedding."""
