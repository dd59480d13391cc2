"""What holds for every test."""

import signal

from hypothesis import HealthCheck, settings

# How long an example takes is a matter of what else the machine does.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell starts what is in its background deaf to Ctrl-C, and the processes of our tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
