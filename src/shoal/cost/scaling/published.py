"""Published exponents of learning curves and of model sizes, as data.

Source: Hestness et al., Deep Learning Scaling is Predictable, Empirically, 2017, tables
and figures of section 4; theory after Amari et al., 1992, and Vapnik, 1998.
"""

from __future__ import annotations

from shoal.core.config import Value

__all__ = ["PUBLISHED", "THEORY", "Exponent"]


class Exponent(Value):
    """One published exponent.

    Args:
        task: domain.
        metric: what falls.
        error: exponent of the error over data; None if not given.
        size: exponent of the best model's size over data; None if not given.
    """

    task: str
    metric: str
    error: float | None = None
    size: float | None = None


PUBLISHED: tuple[Exponent, ...] = (
    Exponent(task="word language model", metric="cross-entropy", error=-0.066, size=0.70),
    Exponent(task="character language model", metric="cross-entropy", error=-0.094, size=0.78),
    Exponent(task="machine translation", metric="cross-entropy", error=-0.128, size=None),
    Exponent(task="image classification", metric="top-1 error", error=-0.309, size=0.57),
    Exponent(task="speech recognition", metric="character error rate", error=-0.30, size=None),
)

THEORY: tuple[Exponent, ...] = (
    Exponent(task="counting, absolute error", metric="absolute error", error=-0.5),
    Exponent(task="estimation in a known family", metric="excess risk", error=-1.0),
)
