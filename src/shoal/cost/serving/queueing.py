"""Closed forms of the time to the first token when equal prompts arrive at random.

Prompts of one length come as a Poisson process, and each takes ``service`` seconds on an
instance that computes one at a time. That is an M/D/1 queue.

Source: Zhong et al., DistServe, 2024, equation 1; Kleinrock, Queueing Systems, 1975.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import require


def md1_ttft(rate: float, service: float) -> float:
    """Mean time to the first token on one device, s: ``D + R D^2 / (2 (1 - R D))``.

    Args:
        rate: prompts per second, R.
        service: s that a prompt takes alone, D.

    Raises:
        ConfigError: prompts come at least as fast as they are computed, or a value is none.
    """
    require(
        service > 0 and math.isfinite(service),
        "queue.service",
        service,
        expected="seconds above 0",
    )
    require(
        rate >= 0 and rate * service < 1,
        "queue.rate",
        rate,
        expected=f"0 or more, and less than {1 / service:.4g} a second, all that one device can "
        f"compute at {service:g} s a prompt",
        hint="at that rate the queue grows without end; lower the rate or add an instance",
    )
    return service + rate * service**2 / (2 * (1 - rate * service))


def busy_share(service: float, waits: Sequence[float], share: float) -> float:
    """The share of its time that a server may be busy, so that enough of its queue wait no longer.

    An arrival finds the server busy with that probability, and then waits for a time that is
    nearly exponential: ``P(W > t) = R exp(-2 (1 - R) t / S)`` with R the share that is busy.

    Args:
        service: s, S: the mean square of the time that each takes over its mean.
        waits: s that each may wait; below 0 it fails anyway.
        share: of them that must wait no longer, in (0, 1].

    Returns:
        R; 0 where too many fail even before an idle server.

    Source: Kingman, The heavy traffic approximation in the theory of queues, 1965.
    """
    require(service > 0, "queue.service", service, expected="seconds above 0")

    def late(busy: float) -> float:
        rest = 2 * (1 - busy) / service
        return sum(1.0 if t < 0 else busy * math.exp(-rest * t) for t in waits) / len(waits)

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if late(middle) <= 1 - share + 1e-9:
            low = middle
        else:
            high = middle
    return low
