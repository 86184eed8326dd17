"""What the gallery shows of each paper, newest results first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from shoal.claims.catalogue import CatalogueRow
from shoal.claims.protocols import (
    PAIRED_STATISTICS,
    Evidence,
    Metric,
    MetricVerdict,
    PairedSamples,
    Status,
)
from shoal.claims.record import ClaimRecord, RecordFault
from shoal.claims.standing import CatalogueStatus, standings
from shoal.core.config import Value
from shoal.core.web.site import number

# What is shown: the statuses, and what a results file can be instead of believed.
MEANINGS: dict[str, str] = {
    "works": "really run, and every threshold holds at the worse end of its interval",
    "modelled": "every threshold holds, and a headline is simulated or computed",
    "falls_short": "a threshold is missed by the whole interval",
    "noisy": "an interval straddles its threshold or is too wide; never a pass",
    "skipped": "it cannot be judged here, or the claim is void",
    "edited": "the results file was edited: its verdict is not shown",
    "dirty": "it was made by code that no commit has: its verdict is not shown",
    "outdated": "the thresholds have changed since; it must be run again",
    "unreadable": "the results file cannot be read",
    "planned": "there is no result yet",
}

EVIDENCE: dict[str, str] = {
    "same_regime": "the quantity itself, really run",
    "mechanism": "really run, but smaller: ratios and counts",
    "simulated": "a simulation",
    "arithmetic": "computed from a formula",
}

_STATISTICS: dict[str, str] = {
    "ratio": "median of the part over its baseline",
    "speedup": "median of the baseline over the part",
    "difference": "median of the part less its baseline",
    "relative_error": "median relative error",
    "value": "median",
    "mean": "mean",
    "max": "largest",
    "min": "smallest",
}

assert set(get_args(Status)) <= set(MEANINGS)
assert set(get_args(Evidence)) == set(EVIDENCE)


class MeasuredMetric(Value):
    """One metric of a results file, with the samples behind it.

    Args:
        metric: what is claimed.
        verdict: what the samples say.
        samples: of the part; None where the verdict came without them.
        aa: of the run with the part replaced by its baseline, if there are any.
        bound: the physical limit of the number on that machine, if known.
        peer: of our baseline beside its named peer, if there are any.
    """

    metric: Metric
    verdict: MetricVerdict
    samples: PairedSamples | None
    aa: PairedSamples | None = None
    bound: float | None = None
    peer: PairedSamples | None = None

    @property
    def title(self) -> str:
        """The metric's name as people read it."""
        return self.metric.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """The unit; empty for a plain number."""
        return {"1": "", "x": "×"}.get(self.metric.unit, self.metric.unit)

    @property
    def needs(self) -> str:
        """The threshold as people read it."""
        return needs(self.metric)

    @property
    def statistic(self) -> str:
        """How the number follows from the samples, in words."""
        return _STATISTICS[self.metric.statistic]

    @property
    def outcome(self) -> str:
        """``works``, ``falls_short`` or ``noisy``, as a status."""
        return self.verdict.outcome

    @property
    def interval(self) -> str:
        """The 90 % interval; empty for an extreme, which has none."""
        if self.metric.statistic in ("max", "min") or self.verdict.low == self.verdict.high:
            return ""
        return f"{number(self.verdict.low)} … {number(self.verdict.high)}"


class SkippedMetric(Value):
    """A metric that could not be measured.

    Args:
        metric: what is claimed.
        reason: why not.
    """

    metric: Metric
    reason: str


class Paper(Value):
    """One paper of the gallery.

    Args:
        row: its row of the catalogue.
        status: what is shown; a key of :data:`MEANINGS`.
        metrics: what its claim promises; empty while there is no experiment.
        measured: what was measured, if the results file can be believed.
        skipped: what was not.
        record: that results file.
        fault: why it cannot be believed.
        stale: code that it depends on has changed since.
        shipped: its verdict came with the package, without samples and results file.
    """

    row: CatalogueRow
    status: str
    metrics: tuple[Metric, ...] = ()
    measured: tuple[MeasuredMetric, ...] = ()
    skipped: tuple[SkippedMetric, ...] = ()
    record: ClaimRecord | None = None
    fault: RecordFault | None = None
    stale: bool = False
    shipped: bool = False

    @property
    def says(self) -> str:
        """What the paper claims, with its numbers kept on one line with their signs."""
        return _tied(self.row.says)

    @property
    def checks(self) -> str:
        """What is checked here, likewise."""
        return _tied(self.row.checks)

    @property
    def evidence(self) -> Evidence | None:
        """Grade of the evidence, or None."""
        return None if self.record is None else self.record.verdict.evidence

    @property
    def started(self) -> str:
        """Time of the run, UTC; empty without one."""
        return "" if self.record is None else self.record.started

    @property
    def reason(self) -> str:
        """Why it does not work, in a sentence; empty if there is none."""
        if self.fault is not None:
            if self.fault.kind == "edited" and not self.fault.text.startswith("was edited"):
                return f"edited: {self.fault.text}"
            return self.fault.text
        return "" if self.record is None else self.record.verdict.reason

    @property
    def linked(self) -> bool:
        """Whether its results file can be shown as it is."""
        if self.fault is not None:
            return self.fault.kind != "unreadable" and not self.shipped
        return self.record is not None and not self.shipped

    @property
    def command(self) -> str:
        """The command that repeats it; empty while there is no experiment."""
        if self.record is not None:
            return self.record.command
        return f"shoal claims run {self.row.claim}" if self.row.claim else ""

    @property
    def words(self) -> str:
        """Everything that the search looks at, in lower case."""
        row = self.row
        shown = (str(row.id), row.name, row.title, str(row.year), row.room, *row.parts)
        return " ".join((*shown, row.says, row.checks, row.claim or "", self.status)).lower()


def index_rows(results: Path | None = None) -> list[Paper]:
    """Every paper: newest results first, then those without a result by their number.

    A results file that was edited is shown as such and the others go on.

    Args:
        results: directory of the results files; that of the clone if not given.
    """
    papers = [_paper(standing) for standing in standings(results)]
    # Stable: a stamp sorts as text, and what cannot be believed comes before the planned.
    papers.sort(key=lambda paper: paper.row.id)
    papers.sort(key=lambda paper: (paper.fault is not None, paper.started), reverse=True)
    return papers


def counts(papers: Sequence[Paper]) -> dict[str, int]:
    """Number of papers by what is shown, zeros included, in the order of :data:`MEANINGS`."""
    return {name: sum(paper.status == name for paper in papers) for name in MEANINGS}


def needs(metric: Metric) -> str:
    """The threshold as people read it, such as ``≥ 1.5 ×``."""
    unit = {"1": "", "x": " ×"}.get(metric.unit, f" {metric.unit}")
    if metric.upper is not None:
        return f"{metric.threshold:g} to {metric.upper:g}{unit}"
    sign = {">=": "≥", "<=": "≤"}[metric.comparison]
    return f"{sign} {metric.threshold:g}{unit}"


def per_sample(metric: Metric, paired: PairedSamples) -> list[float]:
    """What each sample says of the metric, before its statistic."""
    if metric.statistic not in PAIRED_STATISTICS or not paired.baseline:
        return list(paired.method)
    pairs = list(zip(paired.method, paired.baseline, strict=True))
    if metric.statistic == "difference":
        return [m - b for m, b in pairs]
    if metric.statistic == "speedup":
        return [b / m if m else float("inf") for m, b in pairs]
    ratios = [m / b if b else float("inf") for m, b in pairs]
    if metric.statistic == "relative_error":
        return [abs(ratio - 1) for ratio in ratios]
    return ratios


def _tied(text: str) -> str:
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _paper(standing: CatalogueStatus) -> Paper:

    row, record, fault = standing.row, standing.record, standing.fault
    if fault is not None:
        shipped = standing.shipped
        return Paper(row=row, status=fault.kind, metrics=row.metrics, fault=fault, shipped=shipped)
    if record is None:
        return Paper(row=row, status="planned", metrics=row.metrics)
    by_name = {metric.name: metric for metric in record.metrics}
    return Paper(
        row=row,
        status=record.verdict.status,
        metrics=record.metrics,
        measured=tuple(
            MeasuredMetric(
                metric=by_name[verdict.name],
                verdict=verdict,
                samples=record.samples.metrics.get(verdict.name),
                aa=None if record.aa is None else record.aa.metrics.get(verdict.name),
                bound=record.samples.bounds.get(verdict.name),
                peer=record.samples.peers.get(verdict.name),
            )
            for verdict in record.verdict.metrics
        ),
        skipped=tuple(
            SkippedMetric(metric=by_name[name], reason=reason)
            for name, reason in record.verdict.skipped.items()
        ),
        record=record,
        stale=standing.stale,
        shipped=standing.shipped,
    )
