"""What holds for every test."""

from hypothesis import HealthCheck, settings

# How long an example takes is a matter of what else the machine does.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
