"""The goodput explorer: targets and a workload in, what serves most requests within them out.

A search simulates many settings and takes from seconds to minutes. It runs in a thread of its
own, one at a time and no longer than a limit, and the page that asked says how far it is. What
was found is kept. Nothing that a visitor writes is opened as a file.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from shoal.app.dash.explore import check_machine
from shoal.core.config import resolve
from shoal.core.errors import ConfigError, PlanError, ShoalError, require
from shoal.core.svg import Series
from shoal.cost import shapes
from shoal.ir import ServeJob, StepCost
from shoal.machine import described
from shoal.plan.serving.disagg import plan_goodput
from shoal.plan.serving.goodput import Slo, replicas
from shoal.plan.serving.goodput_report import GoodputReport
from shoal.plan.serving.simulation import sharded_costs
from shoal.serve.watch.moments import Watch
from shoal.serve.watch.scrape import share_below

# Workloads that need no file.
FAMILIES = ("chat", "code", "summary", "multiturn", "shared_prefix")
LIMIT_S = 120.0
_MOST_DEVICES, _KEPT = 16, 32
# Rates are found to so much of themselves: a page is looked at, not built upon.
_TOLERANCE = 0.1
_FIELDS = {
    "model": "Qwen3-8B",
    "machine": "2xH100",
    "workload": "chat",
    "ttft": "500",
    "tpot": "50",
    "share": "90",
    "rate": "",
}


@dataclass(frozen=True)
class _Question:
    """What a visitor asks, checked.

    Args:
        workload: name of a family.
        slo: the targets.
    """

    model: str
    machine: str
    workload: str
    slo: Slo


@dataclass
class GoodputSearch:
    """A search, as it goes on.

    Args:
        stop: set to end it.
        ends: when its time is over, s on the clock of :class:`GoodputSearches`.
        done: settings that were tried, of ``total``.
        total: all of them; 0 before it is known.
        finished: set when it does not go on.
        report: what was found; None if nothing was, or not yet.
        error: why nothing was found.
    """

    question: _Question
    ends: float
    stop: threading.Event = field(default_factory=threading.Event)
    done: float = 0
    total: float = 0
    finished: threading.Event = field(default_factory=threading.Event)
    report: GoodputReport | None = None
    error: str = ""


Plan = Callable[..., GoodputReport]


class GoodputSearches:
    """Searches for goodput, one at a time; a new question ends the one before.

    Args:
        limit_s: s that a search may take.
        plan: who searches.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        plan: Plan = plan_goodput,
    ) -> None:
        self.limit_s, self._clock, self._plan = limit_s, clock, plan
        self._known: OrderedDict[_Question, GoodputSearch] = OrderedDict()
        self._lock, self._working = threading.Lock(), threading.Lock()

    def find(self, asked: _Question) -> GoodputSearch | None:
        """The search of a question that was asked before and is not forgotten."""
        with self._lock:
            return self._known.get(asked)

    def ask(self, asked: _Question) -> GoodputSearch:
        """The search of a question, begun if there is none that goes on or found something."""
        with self._lock:
            value = self._known.get(asked)
            if value is None or value.stop.is_set():
                for other in self._known.values():
                    if not other.finished.is_set():
                        other.stop.set()
                value = GoodputSearch(asked, self._clock() + self.limit_s)
                self._known[asked] = value
                threading.Thread(target=self._run, args=(value,), daemon=True).start()
            self._known.move_to_end(asked)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)[1].stop.set()
            return value

    def _run(self, search: GoodputSearch) -> None:
        request = search.question

        def progress(done: float, total: float, _text: str) -> None:
            search.done, search.total = done, total

        try:
            with self._working:  # one that was stopped ends with the step that it simulates
                search.ends = self._clock() + self.limit_s
                job = resolve(
                    ServeJob, flags={"model": request.model, "workload": request.workload}
                ).value
                machine = described.load(request.machine)
                costs = sharded_costs(job, machine)
                search.report = self._plan(
                    job,
                    machine,
                    request.slo,
                    costs=lambda tp, pp: _Bounded(costs(tp, pp), search, self),
                    tolerance=_TOLERANCE,
                    progress=progress,
                )
        except ShoalError as cause:
            search.error = str(cause)
        finally:
            if search.report is None and not search.error:
                search.error = "the search failed; the terminal of the dashboard shows the error"
            search.finished.set()

    def check(self, search: GoodputSearch) -> None:
        """End a search that is not wanted any more, or takes too long.

        Raises:
            PlanError: it is one.
        """
        if search.stop.is_set():
            raise PlanError("another search was started meanwhile; try again")
        if self._clock() > search.ends:
            search.stop.set()
            raise PlanError(
                f"no result within {self.limit_s:g} s; use fewer devices or a smaller model, or "
                f"run shoal plan serve --slo, which has no time limit"
            )


@dataclass(frozen=True)
class _Bounded:
    """A cost that ends the search that asks it, when its time is over."""

    cost: StepCost
    search: GoodputSearch
    searches: GoodputSearches

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        self.searches.check(self.search)
        return self.cost.seconds(chunks)


@dataclass(frozen=True)
class MeasuredGoodput:
    """What a server did in the last window.

    The histograms give the shares of both targets, not how many requests met both: that lies
    between the ends.

    Args:
        rate: requests per second and replica.
        ttft: share of the requests within that target.
        tpot: the same of the other.
    """

    rate: float
    ttft: float
    tpot: float

    @property
    def low(self) -> float:
        """The least share that may have met both."""
        return max(0.0, self.ttft + self.tpot - 1)

    @property
    def high(self) -> float:
        """The largest share that may have met both."""
        return min(self.ttft, self.tpot)


def measured(watch: Watch | None, slo: Slo) -> MeasuredGoodput | None:
    """What the server behind the dashboard does; None if there is none, or nothing is asked."""
    if watch is None:
        return None
    watch.look()
    ends = watch.between()
    if ends is None:
        return None
    old, new, span = ends
    name = "request_success_total"
    rate = (new.value(name) - old.sums.get(name, 0.0)) / span / max(1, len(new.replicas))
    ttft = share_below(new.since(old, "time_to_first_token_seconds"), slo.ttft)
    tpot = share_below(new.since(old, "request_time_per_output_token_seconds"), slo.tpot)
    if not rate > 0 or math.isnan(ttft):
        return None
    # Answers of one token have no time per token, and miss no target of it.
    return MeasuredGoodput(rate, ttft, 1.0 if math.isnan(tpot) else tpot)


def show(
    query: Mapping[str, str], searches: GoodputSearches, watch: Watch | None, *, begin: bool
) -> dict[str, Any]:
    """What the page shows for the fields of its form; without any, the form alone.

    Args:
        query: the fields.
        searches: where to look.
        watch: the server behind the dashboard.
        begin: begin a search that was not asked for before.
    """
    given = {key: value.strip()[:100] for key, value in query.items() if key in _FIELDS}
    page: dict[str, Any] = {
        "models": shapes.names(),
        "machines": described.names(),
        "workloads": FAMILIES,
        "given": {**_FIELDS, **given},
        "query": urlencode(given),
        "error": "",
        "search": None,
        "report": None,
        "chart": None,
        "seen": None,
        "copies": None,
        "state": "finished",
        "limit": searches.limit_s,
    }
    if not given:
        return page
    try:
        request, rate = _checked(page["given"])
        search = searches.ask(request) if begin else searches.find(request)
    except ShoalError as cause:
        page["error"] = str(cause)
        return page
    if search is None:
        page["error"] = "this search has expired; try again"
        return page
    page["search"] = search
    if not search.finished.is_set():
        page["state"] = "running"
        return page
    page["error"], report = search.error, search.report
    if report is not None:
        page["report"] = report
        more = []
        if rate is not None:
            each = rate / report.devices
            if each < 2 * report.best.per_device:  # further away it would only make the rest small
                more.append(Series("requested rate", [each] * 2, [0.0, 1.0], dashed=True))
            page["copies"] = replicas(rate, report.best.goodput)
        page["seen"] = seen = measured(watch, request.slo)
        if seen is not None:
            more.append(Series("your server", [seen.rate] * 2, [seen.low, seen.high], points=True))
        page["chart"] = report.chart(*more)
        if watch is not None:
            page["state"] = "running"  # the server's point moves
    return page


def _checked(given: Mapping[str, str]) -> tuple[_Question, float | None]:
    """The question, and requests per second that shall be served."""
    machine = check_machine(given["machine"])
    devices = described.load(machine).num_devices
    require(
        2 <= devices <= _MOST_DEVICES,
        "machine",
        machine,
        expected=f"2 to {_MOST_DEVICES} devices here, such as 4xH100",
        hint="use shoal plan serve --slo for more",
        error=ConfigError,
    )
    require(
        given["workload"] in FAMILIES,
        "workload",
        given["workload"],
        expected=", ".join(FAMILIES),
        error=ConfigError,
    )
    slo = Slo(
        ttft=_number(given, "ttft", 0.01, 1e6) / 1e3,
        tpot=_number(given, "tpot", 0.01, 1e6) / 1e3,
        share=_number(given, "share", 1, 100) / 100,
    )
    rate = _number(given, "rate", 1e-3, 1e6) if given["rate"] else None
    return _Question(shapes.find(given["model"]).name, machine, given["workload"], slo), rate


def _number(given: Mapping[str, str], name: str, low: float, high: float) -> float:
    try:
        result = float(given[name])
    except ValueError:
        result = math.nan
    require(
        low <= result <= high,
        name,
        given[name],
        expected=f"a number from {low:g} to {high:g}",
        error=ConfigError,
    )
    return result
