"""How good rankings are, where each query has documents of known gain.

Source: Järvelin and Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques, 2002.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def ndcg(ranked: Sequence[str], gains: Mapping[str, float], k: int = 10) -> float:
    """Discounted gain of the first k, over that of the best order; 0 if nothing has a gain."""
    found = _discounted([gains.get(item, 0.0) for item in ranked[:k]])
    best = _discounted(sorted(gains.values(), reverse=True)[:k])
    return found / best if best else 0.0


def reciprocal_rank(ranked: Sequence[str], gains: Mapping[str, float], k: int = 10) -> float:
    """1 over the place of the first document with a gain; 0 if it is not among the first k."""
    places = (at for at, item in enumerate(ranked[:k], 1) if gains.get(item, 0.0) > 0)
    return 1 / next(places, math.inf)


def _discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(at + 1) for at, gain in enumerate(gains, 1))
