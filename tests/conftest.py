"""Settings for all tests. Its being here also makes ``builders`` importable for them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Shared machines are slow at times: a property fails for what it finds, not for how long it took.
settings.register_profile(
    "synergy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("synergy")
