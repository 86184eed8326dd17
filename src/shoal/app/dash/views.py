"""What each page shows, read from where it lies. No page computes anything of its own."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from shoal.app.dash import charts
from shoal.checkpoint.history import slowest
from shoal.claims.catalogue import catalogue
from shoal.claims.gallery.pages import GalleryPaths, facets
from shoal.claims.gallery.papers import Paper, index_rows
from shoal.core.config import ResolvedValue
from shoal.core.errors import ShoalError
from shoal.core.svg import Chart
from shoal.core.tables import Table
from shoal.cost.score import ErrorSummary, summarise
from shoal.ir import Machine, Plan, Quantity, Report, compared, kind_of, kinds, quantities
from shoal.machine.described import load, names
from shoal.plan.saved import read_plan
from shoal.serve.watch.moments import WINDOW_S, Watch
from shoal.train.runs import (
    FILES,
    Events,
    Runs,
    RunStatus,
    drawn,
    finite,
    number,
    open_inside,
    rank_errors,
)
from shoal.train.saves import checkpoints, heat_of, stalls_of

if TYPE_CHECKING:
    from shoal.app.dash.app import DashboardSettings

_T = TypeVar("_T")


@dataclass(frozen=True)
class Pager:
    """One page of a long list.

    Args:
        page: number of this page, from 1.
        pages: how many there are.
        first: index of its first row.
        last: index after its last row.
        base: address of the list.
        query: what else stands in the address.
    """

    page: int
    pages: int
    first: int
    last: int
    total: int
    base: str
    query: Mapping[str, str]

    @classmethod
    def of(cls, total: int, wanted: str, size: int, base: str, query: Mapping[str, str]) -> Pager:
        """The page that an address asks for, or the nearest there is."""
        pages = max(1, math.ceil(total / size))
        page = int(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 else 1
        page = min(max(page, 1), pages)
        first = (page - 1) * size
        return cls(page, pages, first, min(first + size, total), total, base, query)

    def href(self, page: int) -> str:
        """Address of another page of the list."""
        words = {key: value for key, value in self.query.items() if value}
        if page > 1:
            words["page"] = str(page)
        return self.base + (f"?{urlencode(words)}" if words else "")


@dataclass(frozen=True)
class PageSection:
    """A section of a page that may fail without the others.

    Args:
        value: what it shows; None when it failed.
        error: why it failed, for people.
    """

    value: Any
    error: str = ""

    @classmethod
    def of(cls, read: Callable[[], Any]) -> PageSection:
        """What ``read`` gives, or the error it raises."""
        try:
            return cls(read())
        except ShoalError as error:
            return cls(None, str(error))


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one quantity in words."""

    label: str
    quantity: str
    summary: ErrorSummary


def date(stamp: float) -> str:
    """A moment as people of this machine's time zone read it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp))


def iso(stamp: float) -> str:
    """A moment as programs read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stamp))


def tone(share: float) -> str:
    """How an error of a prediction looks: within 10 %, within 25 %, or worse."""
    return "good" if abs(share) <= 0.1 else "warm" if abs(share) <= 0.25 else "bad"


FILTERS: dict[str, Callable[..., object]] = {"date": date, "iso": iso, "tone": tone}


def matches(found: RunStatus, words: str) -> bool:
    """Name or model contains every word, large or small."""
    return _contains(f"{found.entry.name} {found.entry.model} {found.entry.kind}", words)


def _contains(text: str, words: str) -> bool:
    return all(word in text.lower() for word in words.lower().split())


def overview(settings: DashboardSettings, runs: Runs) -> dict[str, Any]:
    """The first page."""
    everything = PageSection.of(runs.all)
    newest = PageSection.of(lambda: runs.detailed((everything.value or [])[:6]))
    return {
        "machine": PageSection.of(lambda: load("local")),
        "runs": PageSection(newest.value, everything.error or newest.error),
        "num_runs": len(everything.value or []),
        "num_live": sum(found.live for found in everything.value or []),
        "errors": PageSection.of(lambda: _errors(runs.score().errors())),
        "server": settings.server,
        "health": None if settings.server is None else settings.server.health(),
        "num_papers": len(catalogue()),
    }


def _errors(summaries: Sequence[ErrorSummary]) -> list[ErrorRow]:
    order = {name: place for place, name in enumerate(quantities())}
    several = len({one.kind for one in summaries}) > 1
    errors = [
        ErrorRow(
            _words(one.quantity, one.kind) + (f" ({one.kind})" if several and one.kind else ""),
            one.quantity,
            one,
        )
        for one in summaries
    ]
    return sorted(errors, key=lambda row: order.get(row.quantity, len(order)))


def _shown(quantity: str, kind: str = "") -> Quantity:
    """How a quantity is shown; one that no kind of job knows any more by its name."""
    known = quantities(kind).get(quantity)
    return known or Quantity(name=quantity, label=quantity.replace("_", " "))


def _words(quantity: str, kind: str = "") -> str:
    """The label of a quantity, as the kind words it, or else the first that has it."""
    for _, one in sorted(kinds().items(), key=lambda item: item[0] != kind):
        names = [known.name for known in one.quantities]
        if quantity in names:
            return _alone([known.label for known in one.quantities])[names.index(quantity)]
    return _shown(quantity).label


def _compared(report: Report[Any]) -> list[tuple[str, str, str, str]]:
    rows = compared(report)
    names = _alone([row[0] for row in rows])
    return [(name, *row[1:]) for name, row in zip(names, rows, strict=True)]


def _alone(labels: Sequence[str]) -> list[str]:
    """Labels of a table's rows that can stand alone: an indented one names what it belongs to."""
    whole, outcome = "", []
    for label in labels:
        if not label.startswith(" "):
            whole = label.partition(",")[0].partition(" (")[0]
        outcome.append(f"{whole}, {label.strip()}" if label.startswith(" ") else label)
    return outcome


def machine() -> dict[str, Any]:
    """The machine called local."""
    try:
        loaded: Machine | None = load("local")
        error = ""
    except ShoalError as cause:
        loaded, error = None, str(cause)
    return {"machine": loaded, "error": error, "described": names()}


def run(runs: Runs, found: RunStatus) -> dict[str, Any]:
    """One run: how far it is, its curves, prediction beside measurement."""
    entry = found.entry
    events = runs.events(entry)
    report = PageSection.of(lambda: runs.report(entry))
    plan_ = PageSection.of(lambda: runs.plan(entry))
    last = events.last
    total = int(number(events.start.get("total"))) if events.start.get("total") else 0
    # A job that is not trained in steps is one step, which it does not report.
    done = int(last["step"]) + 1 if last else total if found.state == "finished" else 0
    left = (total - done) * number(last.get("step_s")) if last and found.live else None
    return {
        "run": found,
        "last": {key: finite(last.get(key)) for key in _LAST},
        "done": done,
        "total": total,
        "left_s": left if left is not None and math.isfinite(left) else None,
        "start": events.start,
        "resumed": max(0, events.starts - 1),
        "rows": _rows(events),
        "saves": (saves := checkpoints(entry.path, events)),
        "pictures": [one for one in (heat_of(saves), stalls_of(saves)) if one is not None],
        "newest": (newest := saves[0].save if saves else None),
        "slowest": {} if newest is None else slowest(newest),
        "plan": plan_.value,
        "compared": [] if report.value is None else _compared(_so_far(report.value, found.live)),
        "results": [] if report.value is None or found.live else _results(report.value, entry.path),
        "followed": _followed(events, plan_.value),
        "charted": events.follower is not None and bool(events.follower.charts()),
        "drawn": [] if entry.path is None else drawn(entry.path),
        "troubles": _troubles(found, events, plan_.error or report.error),
        "sample": events.sample,
        "files": _files(entry.path),
        "versions": sorted(report.value.versions.items()) if report.value is not None else [],
    }


def _results(report: Report[Any], directory: Path | None) -> list[Table]:
    """The tables that the kind of job shows of a run that has ended; none of a damaged report."""
    try:
        shown = kind_of(report.plan).results(report, directory or Path())
    except (AttributeError, LookupError, TypeError, ValueError):
        return []
    return [one for one in shown if isinstance(one, Table)]


def _followed(events: Events, plan: Plan[Any] | None) -> list[Table]:
    """The tables of a run that its kind of job makes of its events, while it runs and after."""
    if events.follower is None or plan is None:
        return []
    return list(events.follower.tables(plan))


def _rows(events: Events) -> list[dict[str, float | None]]:
    """Some steps of a run with what they report, the last one among them."""
    steps = sorted(events.steps)
    every = math.ceil(len(steps) / _MOST_ROWS) or 1
    return [
        {"step": step, **{key: finite(events.steps[step].get(key)) for key in _LAST}}
        for step in steps[::-1][::every][::-1]
    ]


# Rows of the table beside the charts of a run.
_MOST_ROWS = 12
_LAST = ("loss", "tokens_per_s", "mfu", "memory_bytes", "step_s", "lr", "grad_norm")


def _so_far(report: Report[Any], live: bool) -> Report[Any]:
    """A report without the error of what is not complete yet."""
    if not live:
        return report
    errors = {name: error for name, error in report.errors.items() if name != "total_s"}
    return report.model_copy(update={"errors": errors})


def _troubles(found: RunStatus, events: Events, error: str) -> list[str]:
    """What a reader should know before trusting the page."""
    notes = [error] if error else []
    root = found.entry.path
    if root is not None and not root.is_dir():
        notes.append(f"the directory {root} does not exist any more; the stored score is shown")
    if events.skipped_lines:
        notes.append(f"{events.skipped_lines} invalid lines of its events were skipped")
    if events.shortened:
        notes.append("it has too many events; only the newest are shown")
    if found.state == "failed" and root is not None:
        notes.append(events.error or "it ended unexpectedly: its ranks were killed, or failed")
        notes += rank_errors(root)
    return notes


def _files(root: Path | None) -> list[str]:
    return [] if root is None else [name for name in FILES if _is_file(root, name)]


def _is_file(root: Path, name: str) -> bool:
    file = open_inside(root, name)
    if file is None:
        return False
    file.close()
    return True


@dataclass(frozen=True)
class PlanRow:
    """A plan in a list.

    Args:
        href: where it is shown.
        plan: itself; None when it cannot be read.
        error: why not.
        state: of the run that it is of; empty for a file.
        how: its choices in a few words.
    """

    href: str
    name: str
    plan: Plan[Any] | None
    error: str = ""
    state: str = ""
    how: str = ""


def plans(runs: Runs, found: Sequence[RunStatus]) -> list[PlanRow]:
    """The plans of some runs."""
    rows = []
    for one in runs.detailed(found):
        entry = one.entry
        part = PageSection.of(functools.partial(runs.plan, entry))
        rows.append(
            PlanRow(
                f"/plans/{entry.id}",
                entry.name,
                part.value,
                part.error,
                one.state,
                _how(part.value),
            )
        )
    return rows


def plan_files(paths: Sequence[Path]) -> list[PlanRow]:
    """The plan files that were given."""
    rows = []
    for index, path in enumerate(paths):
        try:
            plan: Plan[Any] = _plan_file(path, path.stat().st_mtime_ns)
            rows.append(PlanRow(f"/plans/file/{index}", path.name, plan, how=_how(plan)))
        except OSError as cause:
            error = f"{path}: cannot be read ({cause.strerror})"
            rows.append(PlanRow(f"/plans/file/{index}", path.name, None, error))
        except ShoalError as cause:
            rows.append(PlanRow(f"/plans/file/{index}", path.name, None, str(cause)))
    return rows


@functools.lru_cache(maxsize=64)
def _plan_file(path: Path, _changed: int) -> Plan[Any]:
    return read_plan(path)


def _how(found: Plan[Any] | None) -> str:
    return "" if found is None else kind_of(found).describe(found)


def plan(found: Plan[Any]) -> dict[str, Any]:
    """Everything a plan says."""
    cost = found.estimate
    return {
        "plan": found,
        "how": _how(found),
        "choices": [(path, value) for path, value, _ in ResolvedValue(found.job).lines()],
        "terms": _shares({} if cost is None else cost.terms_s),
        "memory": _shares({} if cost is None else cost.memory_bytes),
        "predicted": [
            (_words(name, found.job.job), interval.scaled(one.factor), one.unit)
            for name, interval in found.predicted.items()
            if (one := _shown(name, found.job.job).scaled_to(interval.value))
        ],
    }


def _shares(parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(cause, amount, share of the sum), largest first; nothing is left out but zeros."""
    total = sum(parts.values())
    shares = [(name, value, value / total) for name, value in parts.items() if value > 0]
    return sorted(shares, key=lambda row: -row[1])


@dataclass(frozen=True)
class PredictionRow:
    """One prediction in the units that are shown."""

    recorded_s: float
    name: str
    model: str
    label: str
    predicted: float
    measured: float
    unit: str
    error: float
    inside: bool | None


def score(runs: Runs, quantity: str, page: str, size: int) -> dict[str, Any]:
    """Every prediction beside what was measured."""
    rows = runs.score().rows(jobs=False, scored=True)
    errors = _errors(summarise(rows))
    wanted = [row for row in rows if quantity in ("", row.quantity)][::-1]
    pager = Pager.of(len(wanted), page, size, "/score", {"quantity": quantity})
    shown = []
    for row in wanted[pager.first : pager.last]:
        shown_as = _shown(row.quantity, row.kind).scaled_to(row.measured)
        assert row.predicted is not None
        assert row.error is not None
        shown.append(
            PredictionRow(
                row.recorded_s,
                row.name,
                row.model or row.kind,
                _words(row.quantity, row.kind),
                row.predicted * shown_as.factor,
                row.measured * shown_as.factor,
                shown_as.unit,
                row.error,
                row.inside,
            )
        )
    return {
        "errors": errors,
        "rows": shown,
        "pager": pager,
        "quantity": quantity,
        "num_runs": len({row.recorded_s for row in rows}),
    }


def score_charts(runs: Runs) -> list[Chart]:
    """Measured against predicted, of the first quantities that have predictions."""
    rows = runs.score().rows(jobs=False, scored=True)
    drawn = []
    for one in _errors(summarise(rows))[:6]:
        own = [row for row in rows if row.kind == one.summary.kind]
        shown_as = _shown(one.quantity, one.summary.kind)
        label = ", ".join(filter(None, (one.label, shown_as.unit)))
        drawn.append(charts.of_score(own, one.quantity, label, shown_as.factor))
    return [chart for chart in drawn if chart is not None]


def server(watch: Watch) -> dict[str, Any]:
    """How the server is now, and how it was in the last minutes."""
    health, moments = watch.look()
    drawn = any(one.values for one in moments)
    return {"health": health, "drawn": drawn, "window": round(WINDOW_S)}


# The gallery's pages, at the dashboard's addresses.
PLACES = GalleryPaths(
    index="/claims",
    paper="/claims/{id}",
    group="/claims/{kind}/{value}",
    results="/claims/results/{claim}.json",
)


def papers(results: Path) -> tuple[Paper, ...]:
    """Every paper with its verdict, computed again when a results file has changed."""
    seen = []
    for row in catalogue():
        path = results / f"{row.claim}.json"
        if row.claim is not None and path.is_file():
            result = path.stat()
            seen.append((path.name, result.st_mtime_ns, result.st_size))
    return _papers(results.absolute(), tuple(seen))


@functools.lru_cache(maxsize=4)
def _papers(results: Path, _seen: tuple[tuple[str, int, int], ...]) -> tuple[Paper, ...]:
    return tuple(index_rows(results))


def group(
    found: Sequence[Paper], kind: str, value: str
) -> tuple[list[Paper], tuple[str, str]] | None:
    """The papers of a group as its address names it, and the group; None if there is none."""
    wanted = PLACES.of_group(kind, value)
    names = [name for name in facets(found).get(kind, {}) if PLACES.of_group(kind, name) == wanted]
    if not names:
        return None
    of: Callable[[Paper], object] = {
        "status": lambda paper: paper.status,
        "room": lambda paper: paper.row.room,
        "evidence": lambda paper: paper.evidence,
    }[kind]
    return [paper for paper in found if of(paper) == names[0]], (kind, names[0])
