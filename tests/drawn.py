"""What the tests that draw bad input have in common."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase

# The same draws each time, however long one takes.
STEADY = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
# Way in -> inputs that are refused there at least, of those that are drawn.
LEAST = {"command line": 90, "YAML": 50, "Python": 120, "HTTP": 150}
