"""Max-min fair rates: no flow can have more without taking it from one that has no more.

Progressive filling, all of it at once: a link whose every flow is held by no other link more
tightly is a bottleneck wherever it lies, so all such links are settled in one round. Flows of
independent phases can be solved together, since their links differ.

Source: Bertsekas and Gallager, Data Networks, 1992 (max-min fairness and the certificate);
Ros-Giralt et al., On the Bottleneck Structure of Congestion-Controlled Networks, 2019.
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import PlanError

_SAME = 1e-9


def max_min_rates(
    links: np.ndarray, capacity: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Rate of every flow, B/s, [P].

    Args:
        links: numbers of the links of each flow, [P, W]; a link without limit pads a row.
        capacity: byte/s of each link, [N].
        weights: share of the flow's rate that each link carries, [P, W]; all of it, if None.

    Raises:
        PlanError: a flow crosses a link that is down, or no link with a limit.
    """
    rates = np.zeros(len(links))
    left = np.array(capacity, np.float64)
    alive = np.arange(len(links))
    lk, wt = links, weights
    while len(alive):
        flat = lk.ravel()
        load = np.bincount(flat, None if wt is None else wt.ravel(), len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, left / load, np.inf)
        per = share[lk]
        level = per.min(axis=1)
        if not np.isfinite(level).all() or not (level > 0).all():
            bad = int(alive[np.flatnonzero(~(np.isfinite(level) & (level > 0)))[0]])
            raise PlanError(
                f"flow {bad}: its rate would be {float(level[alive == bad][0]):g} B/s; expected "
                "every flow to cross a link with a limit and none that is down"
            )
        # A link is settled when none of its flows is held more tightly elsewhere.
        loose = per > level[:, None] * (1 + _SAME)
        open_ = np.zeros(len(left), bool)
        open_[flat[loose.ravel()]] = True
        frozen = (~loose & ~open_[lk]).any(axis=1)
        rates[alive[frozen]] = level[frozen]
        taken = np.repeat(level[frozen], lk.shape[1])
        if wt is not None:
            taken = taken * wt[frozen].ravel()
        left -= np.bincount(lk[frozen].ravel(), taken, len(left))
        np.maximum(left, 0.0, out=left)
        keep = ~frozen
        alive, lk = alive[keep], lk[keep]
        wt = None if wt is None else wt[keep]
    return rates
