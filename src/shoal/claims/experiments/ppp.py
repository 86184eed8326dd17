"""[27] PPP: are the clusters the same from every seed and row order, and as many as there are?

Source: Probabilistic Partitive Partitioning, 2020.

Iris, wine, digits, ten sets of blobs with 2 to 12 clusters of unequal size, and uniform noise; each
is clustered from all seeds, and from each of them with its rows in all orders. Beside PPP stand
k-means, which is given the number of clusters, X-means, and scikit-learn's HDBSCAN with its
defaults. The A/A run has k-means in the place of PPP, or X-means where
the number of clusters counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.ppp_sets import (
    BLOBS,
    K_MAX,
    hdbscan_labels,
    kmeans_labels,
    outcomes,
    seconds_of,
    set_named,
    xmeans,
)
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part, table

_HARD = ("digits", *(f"blobs{k}" for k in BLOBS if k >= 8))


@part
class PPPClaim(BaseClaim, row=27, needs=("sklearn",)):
    """PPP on sets whose clusters are known, and on a million rows.

    Args:
        seeds: from which each set is clustered.
        orders: of its rows, for each seed.
        fits: of a million rows.
    """

    seeds: int = 20
    orders: int = 20
    fits: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Cluster and compare; the quick run has few small sets, seeds and orders."""
        names = ("iris", "wine", "digits", *(f"blobs{k}" for k in BLOBS), "noise")
        seeds, orders = self.seeds, self.orders
        if run.quick:
            names, seeds, orders = ("iris", "blobs3", "blobs12", "noise"), 2, 2
        from sklearn.metrics import adjusted_rand_score, silhouette_score

        sets, agree, hard, right, gains, scores = {}, [], [], [], [], {}
        with table("pool").build("local").open() as pool:
            for at, name in enumerate(names):
                run.progress(f"{name}: {seeds} seeds, {orders} orders", 0.8 * at / len(names))
                data = sets[name] = set_named(name, run.seed)
                ours = run.remember(name, partial(outcomes, pool, data, run.seed, seeds, orders))
                kmeans = run.remember(f"{name} k-means", partial(kmeans_labels, data, self.seeds))
                apart = run.remember(f"{name} x-means", partial(xmeans, data.X, K_MAX, run.seed))
                peer = run.remember(f"{name} hdbscan", partial(hdbscan_labels, data))
                labels = ours.labels[0]
                same = [_least(one) for one in run.pick((ours.labels, kmeans), (kmeans, kmeans))]
                agree += same[:1] if data.clusters > 1 else [_least(ours.labels)]
                hard += same[1:] if name in _HARD else []
                found = len(np.unique(run.pick(labels, apart)))
                if name == "noise":
                    run.put("noise_clusters", found)
                elif name.startswith("blobs"):
                    right.append(float(abs(found - data.clusters) <= 1))
                if ours.separable.any() and len(np.unique(labels[ours.separable])) > 1:
                    inside = ours.separable
                    gains.append(
                        silhouette_score(data.X[inside], labels[inside])
                        - silhouette_score(data.X, labels)
                    )
                scores[name] = {
                    who: adjusted_rand_score(data.y, one)
                    for who, one in (("ppp", labels), ("xmeans", apart), ("hdbscan", peer))
                } | {"clusters": len(np.unique(labels)), "separable": float(ours.separable.mean())}
        run.put("same_labels", agree)
        run.put("kmeans_hard", float(np.mean(hard)))
        run.put("k_within_one", right)
        run.put("silhouette_gain", gains)
        means = {
            who: float(np.mean([one[who] for one in scores.values()]))
            for who in ("ppp", "xmeans", "hdbscan")
        }
        run.put("over_xmeans", means["ppp"], means["xmeans"])
        run.details |= {"adjusted Rand": scores, "mean adjusted Rand": means}
        if not run.quick:
            run.progress("a million rows", 0.8)
            run.put("million_s", run.remember("million", partial(seconds_of, run.seed, self.fits)))


def _least(labels: Any) -> float:
    """Least adjusted Rand index of the first and another."""
    from sklearn.metrics import adjusted_rand_score

    return min((adjusted_rand_score(labels[0], one) for one in labels[1:]), default=1.0)
