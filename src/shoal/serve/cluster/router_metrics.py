"""Numbers of a router and of all its replicas, as one page for Prometheus.

Every number of a replica gets the label ``replica``, so that nothing is lost by adding up what
does not add up, such as shares; a query sums over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shoal.core.errors import ServeError
from shoal.serve.cluster.replicas import Replica, Replicas

_PREFIX = "shoal:"
_LABEL = "model_name"
_REPLICA = "replica"
_HTTP = "router_http_requests_total"
_ASKED = "router_requests_total"
_RETRIED = "router_retries_total"
_RESUMED = "router_resumed_streams_total"
_UP = "replica_up"
_RESTARTS = "replica_restarts_total"

ROUTER_METRICS: tuple[str, ...] = tuple(
    _PREFIX + name for name in (_HTTP, _ASKED, _RETRIED, _RESUMED, _UP, _RESTARTS)
)
"""Names of the metrics that a router adds to those of its replicas."""

# s for which a replica may think about its numbers.
_WAIT_S = 2.0


class _Replicas(Collector):
    """Whether each replica takes requests, and how often it was started again."""

    def __init__(self, replicas: Replicas, model: str) -> None:
        self._replicas = replicas
        self._model = model

    def collect(self) -> Iterable[Metric]:
        labels = [_LABEL, _REPLICA]
        up = GaugeMetricFamily(_PREFIX + _UP, "1 while it accepts requests.", labels=labels)
        restarts = CounterMetricFamily(_PREFIX + _RESTARTS, "Number of restarts.", labels=labels)
        for replica in self._replicas.all:
            values = [self._model, str(replica.number)]
            up.add_metric(values, float(replica.ready))
            restarts.add_metric(values, float(replica.restarts))
        return [up, restarts]


class _Page(Collector):
    """Pages of several replicas as one."""

    def __init__(self, pages: dict[int, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for number, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                whole = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, _REPLICA: str(number)}
                    whole.samples.append(sample._replace(labels=labels))
        return merged.values()


class RouterMetrics:
    """Counters of a router."""

    def __init__(self, replicas: Replicas, model: str) -> None:
        self._replicas = replicas
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            _PREFIX + _HTTP, "HTTP requests.", (_LABEL, "route", "status"), registry=registry
        )
        self._asked = Counter(
            _PREFIX + _ASKED, "Forwarded requests.", (_LABEL, _REPLICA), registry=registry
        )
        # A replica that was never asked counts 0, so that a rate has a point to start from.
        for replica in replicas.all:
            self._asked.labels(model, str(replica.number))
        self.retried = Counter(
            _PREFIX + _RETRIED,
            "Requests retried at another replica.",
            (_LABEL,),
            registry=registry,
        ).labels(model)
        self.resumed = Counter(
            _PREFIX + _RESUMED,
            "Streams continued at another replica.",
            (_LABEL,),
            registry=registry,
        ).labels(model)
        registry.register(_Replicas(replicas, model))

    def http(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(self._model, route, str(status)).inc()

    def count_request(self, replica: int) -> None:
        """A replica was asked."""
        self._asked.labels(self._model, str(replica)).inc()

    async def text(self) -> bytes:
        """Everything in Prometheus' text format; a replica that is silent is left out."""
        pages = await asyncio.gather(*map(_page, self._replicas.all))
        registry = CollectorRegistry()
        registry.register(
            _Page({number: page for number, page in enumerate(pages) if page is not None})
        )
        return generate_latest(self._registry) + generate_latest(registry)


async def _page(replica: Replica) -> str | None:
    if not replica.ready:
        return None
    try:
        async with asyncio.timeout(_WAIT_S), replica.ask("GET", "/metrics") as answered:
            return (await answered.body()).decode()
    except (ServeError, TimeoutError):
        return None
