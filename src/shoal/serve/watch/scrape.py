"""A page of a server's metrics as numbers: sums over labels, and histograms.

Differences of two pages are what happened between them. Quantiles are read off the buckets of
a histogram, as Prometheus does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from shoal.core.errors import ServeError

_PREFIX = "shoal:"


@dataclass(frozen=True)
class Scrape:
    """One page of metrics, the values of several labels added.

    Args:
        sums: name without the prefix -> sum of its values.
        counts: name -> how many values that are.
        buckets: name of a histogram -> upper bound -> how many values are not above it.
        replicas: names of the replicas behind a router; none for a server alone.
    """

    sums: Mapping[str, float]
    counts: Mapping[str, int]
    buckets: Mapping[str, Mapping[float, float]]
    replicas: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Scrape:
        """What the page says of Shoal's metrics; others are passed over.

        Raises:
            ServeError: it is no page of metrics.
        """
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        buckets: dict[str, dict[float, float]] = {}
        replicas = set()
        try:
            families = list(text_string_to_metric_families(text))
            for sample in (one for family in families for one in family.samples):
                if not sample.name.startswith(_PREFIX):
                    continue
                name, value = sample.name.removeprefix(_PREFIX), float(sample.value)
                if "replica" in sample.labels:
                    replicas.add(sample.labels["replica"])
                if "le" not in sample.labels:
                    sums[name] = sums.get(name, 0.0) + value
                    counts[name] = counts.get(name, 0) + 1
                else:
                    limit = float(sample.labels["le"])
                    known = buckets.setdefault(name.removesuffix("_bucket"), {})
                    known[limit] = known.get(limit, 0.0) + value
        except (ValueError, IndexError) as cause:
            raise ServeError(f"expected a page of metrics for Prometheus: {cause}") from cause
        return cls(sums, counts, buckets, frozenset(replicas))

    def value(self, name: str) -> float:
        """Sum of a metric; NaN if there is none."""
        return self.sums.get(name, math.nan)

    def mean(self, name: str) -> float:
        """Mean of a metric over its labels, as for shares of several replicas; NaN if none."""
        return self.value(name) / self.counts.get(name, 1)

    def follows(self, before: Scrape) -> bool:
        """Whether differences to ``before`` are valid, because no server restarted in between."""
        counters = (name for name in before.sums if name.endswith(("_total", "_count")))
        return self.replicas == before.replicas and all(
            self.sums.get(name, 0.0) >= before.sums[name] for name in counters
        )

    def since(self, before: Scrape, name: str) -> Mapping[float, float]:
        """What came into a histogram since ``before``, by upper bound."""
        old = before.buckets.get(name, {})
        return {
            bound: count - old.get(bound, 0.0)
            for bound, count in self.buckets.get(name, {}).items()
        }


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """The value that ``share`` of a histogram is not above; NaN for an empty one.

    Within a bucket the values are taken as spread evenly. Beyond the last bound that is
    finite, it is that bound: at least so much.

    Args:
        buckets: upper bound -> how many values are not above it.
        share: in [0, 1].
    """
    wanted = share * buckets.get(math.inf, 0.0)
    low = below = 0.0
    if not wanted > 0:
        return math.nan
    for bound in sorted(buckets):
        if buckets[bound] >= wanted:
            inside = (wanted - below) / (buckets[bound] - below)
            return low + inside * (bound - low) if math.isfinite(bound) else low
        low, below = bound, buckets[bound]
    return low


def share_below(buckets: Mapping[float, float], value: float) -> float:
    """The share of a histogram that is not above ``value``; NaN for an empty one.

    Args:
        buckets: upper bound -> how many values are not above it.
        value: within a bucket, the values are taken as spread evenly.
    """
    whole = buckets.get(math.inf, 0.0)
    low = below = 0.0
    if not whole > 0:
        return math.nan
    for bound in sorted(buckets):
        if value < bound:
            inside = (value - low) / (bound - low) if math.isfinite(bound) else 0.0
            return (below + inside * (buckets[bound] - below)) / whole
        low, below = bound, buckets[bound]
    return 1.0
