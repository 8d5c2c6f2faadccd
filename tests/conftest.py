"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on who else uses the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
