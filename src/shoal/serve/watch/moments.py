"""The last minutes of a running server, from pages of its metrics.

The server is asked while a page is open, and not more often than every second, however many
pages do. Times are those of the requests within a window: a histogram now, less the same
histogram at the beginning of the window.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.serve.watch.scrape import Scrape, quantile
from shoal.serve.watch.upstream import ServerHealth, Upstream

WINDOW_S = 30.0
# Between two questions, at least; and how far back the pictures go.
EVERY_S, KEPT_S = 1.0, 300.0

_TTFT, _GAP = "time_to_first_token_seconds", "inter_token_latency_seconds"
# Counters whose change within the window is shown: name of the value -> name of the metric.
_CHANGES = {
    "preemptions": "num_preemptions_total",
    "requests": "request_success_total",
    "tokens": "engine_generated_tokens_total",
}


@dataclass(frozen=True)
class Moment:
    """How the server was at one time.

    Args:
        at: s on the watch's clock.
        values: numbers by name; empty when the server gave none. Times are s, shares 0 to 1;
            ``preemptions``, ``requests`` and ``tokens`` are those within the window of
            ``span`` s, which lack while there is no earlier page to compare with.
    """

    at: float
    values: Mapping[str, float]

    def get(self, name: str) -> float:
        """A number; NaN if it is not known."""
        return self.values.get(name, math.nan)

    def rate(self, name: str) -> float:
        """A change within the window, for each second of it."""
        return self.get(name) / self.get("span")


class Watch:
    """Polls the state of one server and stores the history.

    Args:
        upstream: the server.
        clock: s, never going back.
    """

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream, self._clock = upstream, clock
        self._asking = threading.Lock()
        self._pages: deque[tuple[float, Scrape]] = deque()
        self._moments: deque[Moment] = deque()
        self._asked = -math.inf
        self.health = ServerHealth(answers=False, ready=False, message="not asked yet")

    def look(self) -> tuple[ServerHealth, tuple[Moment, ...]]:
        """How the server is, and how it was, oldest first; asks it if that is due."""
        with self._asking:
            if self._clock() - self._asked >= EVERY_S:
                self._ask()
            return self.health, tuple(self._moments)

    def between(self) -> tuple[Scrape, Scrape, float] | None:
        """The pages at both ends of the window, and s between them; None if there are not two."""
        with self._asking:
            if len(self._pages) < 2 or not self.health.answers:
                return None
            (begin, old), (end, new) = self._pages[0], self._pages[-1]
            return old, new, end - begin

    def _ask(self) -> None:
        self.health, page = self._upstream.numbers()
        now = self._asked = self._clock()
        if page is None or (self._pages and not page.follows(self._pages[-1][1])):
            self._pages.clear()
        if page is not None:
            self._pages.append((now, page))
        while self._pages and self._pages[0][0] < now - WINDOW_S:
            self._pages.popleft()
        self._moments.append(Moment(now, {} if page is None else self._values(now, page)))
        while self._moments[0].at < now - KEPT_S:
            self._moments.popleft()

    def _values(self, now: float, page: Scrape) -> dict[str, float]:
        begin, old = self._pages[0]
        result = {
            "running": page.value("num_requests_running"),
            "waiting": page.value("num_requests_waiting"),
            "cache": page.mean("kv_cache_usage_perc"),
        }
        if now > begin:
            result["span"] = now - begin
            for name, metric in (("ttft", _TTFT), ("gap", _GAP)):
                came = page.since(old, metric)
                result[f"{name}_p50"] = quantile(came, 0.5)
                result[f"{name}_p99"] = quantile(came, 0.99)
            for name, metric in _CHANGES.items():
                result[name] = page.value(metric) - old.sums.get(metric, 0.0)
        return {name: value for name, value in result.items() if math.isfinite(value)}
