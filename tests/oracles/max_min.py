"""Whether rates of flows are max-min fair, by the certificate of Bertsekas and Gallager, 1992."""

from __future__ import annotations

import numpy as np


def certificate(
    links: np.ndarray,
    capacity: np.ndarray,
    rates: np.ndarray,
    weights: np.ndarray | None = None,
) -> bool:
    """Whether rates are max-min fair: each flow has a full link on which none is faster.

    Args:
        links: as for :func:`shoal.cost.network.fair.max_min_rates`.
        capacity: as there.
        rates: B/s, [P].
        weights: as there.
    """
    per = np.broadcast_to(rates[:, None], links.shape)
    carried = per if weights is None else per * weights
    load = np.bincount(links.ravel(), carried.ravel(), len(capacity))
    if (load > capacity * (1 + 1e-6)).any():
        return False
    full = load >= capacity * (1 - 1e-6)
    fastest = np.zeros(len(capacity))
    used = np.ones(links.shape, bool) if weights is None else weights > 0
    np.maximum.at(fastest, links[used], per[used])
    held = full[links] & used & (per >= fastest[links] * (1 - 1e-6))
    return bool(held.any(axis=1).all())
