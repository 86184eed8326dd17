"""What a claim is made of: metrics with thresholds, raw samples, a verdict.

The life of a claim: the frame asks :meth:`Experiment.refuses`, calls
:meth:`Experiment.run`, calls it again with ``as_baseline=True`` (the A/A rule), judges
both sets of samples (``judge.py``) and writes ``results/<claim>.json`` (``record.py``).
An experiment never sees its own verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

from pydantic import JsonValue, model_validator

from shoal.claims.cached import CachedResult, cached
from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.ir import Machine

if TYPE_CHECKING:
    from shoal.core.measure import Spread

_T = TypeVar("_T")

# From strongest to weakest: the quantity itself, really run; really run but smaller
# (ratios and counts); simulated; computed from a formula. A verdict has the weakest of its
# headlines.
Evidence = Literal["same_regime", "mechanism", "simulated", "arithmetic"]

# planned: no result yet. works: every headline was really run, and every threshold holds at the
# conservative end of its interval. modelled: so with a headline that is simulated or computed.
# falls_short: at least one threshold is missed by the whole interval. noisy: an interval straddles
# its threshold, or a timing's is wider than +-5 % or has too few pairs, so it must be run again.
# skipped: a headline could not be judged here, or the claim is void, with the reason.
Status = Literal["planned", "works", "modelled", "falls_short", "noisy", "skipped"]

Comparison = Literal[">=", "<=", "within"]

# How a metric's number follows from its raw samples; m is the method's sample and b the
# baseline's sample of the same pair:
#   ratio           median of m / b
#   speedup         median of b / m
#   difference      median of m - b
#   relative_error  median of |m / b - 1|
#   value           median of m (no baseline column)
#   mean            mean of m (no baseline column); with 0 and 1, a share of cases
#   max, min        largest, smallest m (no baseline column)
Statistic = Literal[
    "ratio", "speedup", "difference", "relative_error", "value", "mean", "max", "min"
]
PAIRED_STATISTICS = ("ratio", "speedup", "difference", "relative_error")


_ROUNDING = 1e-6
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
_WANTED = re.compile(rf"(?:([<>]=) {_NUMBER}|{_NUMBER} \.\. {_NUMBER})(?: (\S.*))?")


class Metric(Value):
    """One number a claim is about, and when it is good enough.

    ``wants`` may spell comparison, thresholds and unit in one, as :attr:`condition` does:
    ``>= 1.5 x``, ``<= 0``, ``0.9 .. 1.1 x``.

    Args:
        name: short name, a key of :attr:`ClaimSamples.metrics`.
        unit: unit of the number after the statistic; ``x`` for a ratio, ``1`` for a
            plain number or share.
        statistic: how the number follows from the raw samples.
        comparison: ``>=`` and ``<=`` compare with ``threshold``; ``within`` wants the
            number between ``threshold`` and ``upper``, both included.
        threshold: the threshold, or the lower end of ``within``.
        upper: upper end of ``within``; None for the other comparisons.
        baseline: name of what the part is compared with and replaced by in the A/A run.
        evidence: what kind of evidence the samples are.
        check: an equality, a bound on harm or the same quantity at another scale; the others are
            headlines, the paper's claim, which must fail in the A/A run and give the evidence.
        timing: the samples are times, so that noise matters: it is judged only on a
            quiet machine and an interval wider than +-5 % is ``noisy``.
        quick: the quick run (<= 10 s, counts only) gives this metric too; never for timing.
        peer: name of the peer that our own baseline is held against; empty when the
            baseline is not our own code.
        paper: the paper's own figure, as text, for the gallery.
    """

    name: str
    unit: str = "1"
    statistic: Statistic
    comparison: Comparison
    threshold: float
    upper: float | None = None
    baseline: str
    evidence: Evidence
    check: bool = False
    timing: bool = False
    quick: bool = True
    peer: str = ""
    paper: str = ""

    @model_validator(mode="before")
    @classmethod
    def _wanted(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "wants" not in raw:
            return raw
        rest = {name: value for name, value in raw.items() if name != "wants"}
        match = _WANTED.fullmatch(str(raw["wants"]))
        if match is None:
            raise ConfigError(
                f"metric {raw.get('name')}: wants = {raw['wants']!r}; expected such as '>= 1.5 x', "
                "'<= 0' or '0.9 .. 1.1 x'"
            )
        kind, threshold, low, high, unit = match.groups()
        rest |= {"comparison": kind or "within", "threshold": float(threshold or low)}
        return rest | ({"upper": float(high)} if high else {}) | ({"unit": unit} if unit else {})

    @model_validator(mode="before")
    @classmethod
    def _quick_counts_only(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("timing") and "quick" not in raw:
            return {**raw, "quick": False}
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.timing and self.quick:
            raise ConfigError(f"metric {self.name}: timing and quick; a quick run judges counts")
        if (self.comparison == "within") != (self.upper is not None):
            raise ConfigError(
                f"metric {self.name}: comparison = {self.comparison!r} with upper = {self.upper}; "
                "'within' needs an upper end, and only 'within' has one"
            )
        if self.upper is not None and self.upper < self.threshold:
            raise ConfigError(
                f"metric {self.name}: within {self.threshold:g} .. {self.upper:g} is empty; "
                "give the lower end first"
            )
        return self

    def holds(self, value: float) -> bool:
        """Whether ``value`` meets the threshold."""
        if self.comparison == ">=":
            return value >= self.threshold
        if self.comparison == "<=":
            return value <= self.threshold
        assert self.upper is not None
        return self.threshold <= value <= self.upper

    def may_hold(self, low: float, high: float) -> bool:
        """Whether some value of an interval meets the threshold."""
        if self.upper is not None:
            return low <= self.upper and high >= self.threshold
        return self.holds(low) or self.holds(high)

    def exceeds(self, spread: Spread, bound: float) -> bool:
        """Whether a whole interval lies beyond what is physically possible."""
        if self.comparison == ">=":
            return spread.low > bound * (1 + _ROUNDING)
        return self.comparison == "<=" and spread.high < bound * (1 - _ROUNDING)

    @property
    def condition(self) -> str:
        """The threshold as people write it, such as ``>= 1.5 x``."""
        unit = "" if self.unit == "1" else f" {self.unit}"
        if self.upper is not None:
            return f"{self.threshold:g} .. {self.upper:g}{unit}"
        return f"{self.comparison} {self.threshold:g}{unit}"


class PairedSamples(Value):
    """Raw samples of one metric, in the order they were taken.

    Args:
        method: samples of the part, at least one.
        baseline: samples of the baseline, pair by pair; empty for statistics of the
            method alone.
    """

    method: tuple[float, ...]
    baseline: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if not self.method:
            raise ConfigError("samples: none; give at least one")
        if self.baseline and len(self.baseline) != len(self.method):
            raise ConfigError(
                f"samples: {len(self.method)} of the method and {len(self.baseline)} of the "
                "baseline; they are compared pair by pair, so give equally many"
            )
        return self


class ClaimSamples(Value):
    """Everything one run of an experiment saw. Never a verdict.

    Args:
        metrics: metric -> raw samples.
        skipped: metric -> why it cannot be measured here (such as: no GPU).
        bounds: metric -> the physical limit of its number on this machine.
        peers: metric -> rates (higher is better) of our own baseline (``method``) and of
            the named peer (``baseline``), taken in the same run.
        profile: where the time goes, as text; wanted when a timing metric falls short.
        details: anything else worth keeping: curves, fits, tables.
    """

    metrics: dict[str, PairedSamples] = {}
    skipped: dict[str, str] = {}
    bounds: dict[str, float] = {}
    peers: dict[str, PairedSamples] = {}
    profile: str = ""
    details: dict[str, JsonValue] = {}


class Attempt(Value):
    """Something that was tried to reach a threshold, and what it gave.

    Args:
        metric: the metric that fell short.
        tried: what was changed, in a sentence.
        value: what the metric was then.
    """

    metric: str
    tried: str
    value: float


class MetricVerdict(Value):
    """What one metric's samples say.

    Args:
        name: the metric.
        value: the number, by the metric's statistic.
        low: lower end of the 90 % bootstrap interval.
        high: upper end of it.
        holds: the whole interval meets the threshold.
        noisy: the interval straddles it, or a timing's is too wide or of too few pairs.
        share_of_bound: value over the physical limit, if there is one.
    """

    name: str
    value: float
    low: float
    high: float
    holds: bool
    noisy: bool = False
    share_of_bound: float | None = None

    @property
    def outcome(self) -> Status:
        """``works``, ``falls_short`` or ``noisy``."""
        return "noisy" if self.noisy else "works" if self.holds else "falls_short"


class Verdict(Value):
    """The frame's judgement of a claim; a pure function of samples and thresholds.

    Args:
        status: see :data:`Status`.
        evidence: the weakest grade among the headlines that were judged.
        metrics: verdict of each metric that was judged.
        skipped: metric -> reason.
        reason: why it is not ``works``, in a sentence.
        missing: what a ``falls_short`` still owes its reader (attempts, profile, bound).
    """

    status: Status
    evidence: Evidence | None = None
    metrics: tuple[MetricVerdict, ...] = ()
    skipped: dict[str, str] = {}
    reason: str = ""
    missing: tuple[str, ...] = ()


def _silent(message: str, done: float) -> None:
    """Discard progress."""


@dataclass(frozen=True, kw_only=True)
class ExperimentContext:
    """What an experiment gets from the frame.

    Args:
        work_dir: an empty directory for its files; removed afterwards.
        machine: the probed machine, or None when it was not probed.
        data: the user's own data, or None for the default corpus.
        model: the user's own model directory or name, or None for the experiment's own.
        seed: random seed.
        progress: called with (what is being done, share of the run that is done, 0..1).
        kept: a file for what another run need not do again; None, if nothing is to be kept.
    """

    work_dir: Path
    machine: Machine | None = None
    data: Path | None = None
    model: str | None = None
    seed: int = 0
    progress: Callable[[str, float], None] = _silent
    kept: Path | None = None
    _memory: dict[str, Any] = field(default_factory=dict, repr=False)

    def remember(self, key: str, make: Callable[[], _T]) -> _T:
        """``make()``, once: the A/A run gets what the first run made.

        For what both runs share (trained models, measured curves), so that the A/A run
        repeats only what the replaced part does.
        """
        if key not in self._memory:
            self._memory[key] = make()
        value: _T = self._memory[key]
        return value

    def keep(
        self, key: str, make: Callable[[], JsonValue], *, given: JsonValue, code: Sequence[str]
    ) -> CachedResult:
        """``make()``, once for what it is given and the same code, whatever run asks.

        For long learning whose outcome is the same each time: a claim that was interrupted, or
        whose times were noisy, goes on from there. Never for a time.

        Args:
            key: what it is.
            make: makes it.
            given: all that the outcome depends on beside code and libraries.
            code: files and directories of the package that it depends on.

        Raises:
            StoreError: the file with it is damaged.
        """
        return self.remember(f"kept {key}", lambda: cached(self.kept, key, make, given, code))


@runtime_checkable
class Experiment(Protocol):
    """A part of kind ``claim``: collects the raw samples of one claim.

    A class attribute says what is claimed; the options of the part (its dataclass
    fields) say how much is run. ``run`` is deterministic in everything but times, given
    ``context.seed``.
    """

    rows: ClassVar[tuple[int, ...]]
    """Ids of the catalogue rows (papers) that this claim is about."""

    metrics: ClassVar[tuple[Metric, ...]]
    """What is claimed. At least one metric is ``quick``."""

    attempts: ClassVar[tuple[Attempt, ...]]
    """What was tried where a threshold is not reached; at least two per such metric."""

    def refuses(self, context: ExperimentContext) -> str | None:
        """Why this claim cannot run here (it becomes ``skipped``), or None."""
        ...

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Collect raw samples.

        Args:
            context: where and on what to run.
            quick: at most 10 s and only the metrics marked ``quick``; the verdict of
                these must agree with the full run's.
            as_baseline: put the baseline in the place of the part and collect the same
                metrics; the claim must fail then (A/A rule).

        Returns:
            Samples: every metric wanted is in ``metrics`` or, with a reason, in
            ``skipped``.
        """
        ...
