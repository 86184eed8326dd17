"""Closed forms of the time to the first token when equal prompts arrive at random.

Prompts of one length come as a Poisson process, and each takes ``service`` seconds on an
instance that computes one at a time. That is an M/D/1 queue. A pipeline of two stages takes the
next prompt after half of that time, and two devices that share every layer compute a prompt
``speedup`` times as fast. So at low rates sharing layers answers sooner, and at high rates a
pipeline does.

Source: Zhong et al., DistServe, 2024, equations 1 to 3; Kleinrock, Queueing Systems, 1975.
"""

from __future__ import annotations

import math

from shoal.core.errors import require

__all__ = ["md1_ttft", "md1_ttft_inter", "md1_ttft_intra"]


def md1_ttft(rate: float, service: float) -> float:
    """Mean time to the first token on one device, s: ``D + R D^2 / (2 (1 - R D))``.

    Args:
        rate: prompts per second, R.
        service: s that a prompt takes alone, D.

    Raises:
        ConfigError: prompts come at least as fast as they are computed, or a value is none.
    """
    return service + _wait(rate, service, service, "one device")


def md1_ttft_inter(rate: float, service: float) -> float:
    """The same on a pipeline of two stages: ``D + R D^2 / (4 (2 - R D))``.

    Raises:
        ConfigError: see :func:`md1_ttft`.
    """
    return service + _wait(rate, service / 2, service, "a pipeline of two stages")


def md1_ttft_intra(rate: float, service: float, *, speedup: float) -> float:
    """The same on two devices that share every layer: ``D/K + R D^2 / (2 K (K - R D))``.

    Args:
        rate: prompts per second, R.
        service: s that a prompt takes on one device, D.
        speedup: how many times as fast two devices are, K, in (1, 2] where it pays.

    Raises:
        ConfigError: see :func:`md1_ttft`.
    """
    require(
        1 <= speedup <= 2,
        "queue.speedup",
        speedup,
        expected="1 to 2, how many times as fast two devices are as one",
    )
    return service / speedup + _wait(rate, service / speedup, service, "two devices")


def _wait(rate: float, busy: float, service: float, where: str) -> float:
    """Mean wait before a server that each prompt keeps busy for ``busy`` seconds."""
    require(
        service > 0 and math.isfinite(service),
        "queue.service",
        service,
        expected="seconds above 0",
    )
    require(
        rate >= 0 and rate * busy < 1,
        "queue.rate",
        rate,
        expected=f"0 or more, and less than {1 / busy:.4g} a second, all that {where} can compute "
        f"at {service:g} s a prompt",
        hint="at that rate the queue grows without end; lower the rate or add an instance",
    )
    return rate * busy**2 / (2 * (1 - rate * busy))
