"""What holds for all tests."""

import gc

from hypothesis import HealthCheck, settings

# How long an example takes depends on who else uses the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

gc.disable()  # what libraries make while they are imported stays: to look through it again and again takes time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
