"""Settings for all tests. Its being here also makes ``builders`` importable for them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Shared machines are slow at times: a property fails for what it finds, not for how long it took.
settings.register_profile(
    "synergy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# CI tries the same examples each time, so that a change is judged by what it changed; everybody
# else's runs search on.
settings.register_profile("ci", settings.get_profile("synergy"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "synergy")
