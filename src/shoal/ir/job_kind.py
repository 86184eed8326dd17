"""Kinds of job: what the command line, the score and the dashboard know of each.

A kind is a part of the table ``job``: its module imports without torch. Adding one is a class
that follows :class:`JobKind` and a line of that table; another package adds its own by
the entry point ``job.NAME`` of the group ``shoal.parts``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import field_validator

from shoal.core.config import Kind, Value
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.files import expanded
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.core.svg import Chart
from shoal.core.tables import Table, digits
from shoal.core.theme import Mark

if TYPE_CHECKING:
    from shoal.ir.estimate import Interval
    from shoal.ir.machine import Machine
    from shoal.ir.plan import Plan, Report

Watch = Callable[[dict[str, Any]], None]
"""Called with every event of a run as it happens."""


class Job(Value):
    """What to do, with its data and its choice of parts.

    Args:
        job: the kind of job, a name of the table ``job``.
        name: name of the run and of its directory.
        model: the model that it is about; empty where there is none.
    """

    job: str
    name: str
    model: str = ""

    @field_validator("model")
    @classmethod
    def _possible(cls, model: str) -> str:
        """A name or a path that a file system can have."""
        expanded(model)
        return model


# Seconds below which a time is shown in ms, and in us.
_SHORT_S, _SHORT_MS = 0.1, 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Something that a kind of job predicts or measures.

    Args:
        name: key of ``Report.measured``, with its unit: ``step_s``, ``memory_bytes``.
        label: what people read; indented by two spaces where it is a share of the one above.
        unit: that people read, such as ms; empty for counts.
        factor: of the value, to be in that unit.
        better: which direction is better; empty where neither is.
        headline: of all quantities the one that says how good a plan is.
    """

    name: str
    label: str
    unit: str = ""
    factor: float = 1.0
    better: Literal["", "lower", "higher"] = ""
    headline: bool = False

    @classmethod
    def of_bytes(cls, name: str, label: str) -> Quantity:
        """Memory or traffic, shown in MB."""
        return cls(name=name, label=label, unit="MB", factor=1e-6, better="lower")

    @classmethod
    def of_time(cls, name: str, label: str, unit: Literal["ms", "s"] = "s") -> Quantity:
        """A duration."""
        factor = 1e3 if unit == "ms" else 1.0
        return cls(name=name, label=label, unit=unit, factor=factor, better="lower")

    @classmethod
    def of_share(cls, name: str, label: str, better: Literal["lower", "higher"]) -> Quantity:
        """A share, shown in percent."""
        return cls(name=name, label=label, unit="%", factor=100.0, better=better)

    def scaled_to(self, value: float) -> Quantity:
        """The same quantity in the unit in which a value is read: a short time is not 0.0000168 s.

        Args:
            value: as in ``Report.measured``; all numbers of a column are shown in its unit.
        """
        if self.unit != "s" or self.factor != 1.0 or not 0 < value < _SHORT_S:
            return self
        unit, factor = ("ms", 1e3) if value >= _SHORT_MS else ("us", 1e6)
        return replace(self, unit=unit, factor=factor)

    def text(self, value: float) -> str:
        """The value in the unit that people read."""
        if self.name.endswith("_bytes"):
            return human_bytes(value)
        return f"{digits(value * self.factor)} {self.unit}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag of the command line that sets one value of the job.

    Args:
        name: an identifier, such as ``seq_len`` for ``--seq-len``.
        path: of the value, such as ``data``.
        help: one line.
        read: makes the value of the text that was given; YAML if None.
    """

    name: str
    path: str
    help: str
    read: Callable[[str], object] | None = None


class RunFollower(Protocol):
    """Reads the events of one run of a kind as they are written, for the page of the run."""

    def take(self, event: Mapping[str, Any]) -> None:
        """The next event, of any kind.

        Raises:
            ValueError, TypeError, KeyError: it is damaged; it is then passed over.
        """

    def charts(self) -> Sequence[Chart]:
        """Pictures of what was read so far."""

    def tables(self, plan: Any) -> Sequence[Table]:
        """Tables of what was read so far, of a run of a plan."""


@runtime_checkable
class JobKind(Protocol):
    """One kind of job.

    A kind may also have what follows; the functions of this module say what holds without:
    ``rests_on`` (paths of values that a prediction rests on), ``defaults(job, machine)``,
    ``follow()`` (a :class:`RunFollower` of its events), ``emits`` (the ``Kind`` of
    part that writes its plans for other systems), ``rank(job, machine, **options)``,
    ``tables(plans, verbose=...)``, ``pictures(plans)`` (SVG),
    ``explain(plan)`` (an :class:`~shoal.ir.Explanation` of its price).

    Attributes:
        summary: what such a job does, one line.
        job_type: its value, a :class:`Job`.
        plan_type: :class:`~shoal.ir.Plan` of it.
        report_type: :class:`~shoal.ir.Report` of such a plan.
        quantities: what it predicts and measures, in the order in which people read them.
        flags: what the command line sets without ``--set``; the first argument sets ``subject``.
        subject: path of the value that a user names first, such as ``model``.
        example: the least that such a job says, small enough to be planned in a second.
    """

    summary: ClassVar[str]
    job_type: ClassVar[type[Job]]
    plan_type: ClassVar[type[Plan[Any]]]
    report_type: ClassVar[type[Report[Any]]]
    quantities: ClassVar[tuple[Quantity, ...]]
    flags: ClassVar[tuple[Flag, ...]]
    subject: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]

    def plan(self, job: Any, machine: Machine) -> Sequence[Plan[Any]]:
        """The ways to do it on a machine, best first, each with what it is predicted to take.

        Raises:
            PlanError: there is none.
        """

    def run(
        self,
        plan: Any,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> Report[Any]:
        """Do it on this host, and say what it took.

        Writes ``plan.yaml``, ``events.jsonl`` and ``report.json`` into the directory, and adds the
        report to the score. Events of kind ``prepare`` have a ``state`` of (done, total, text).

        Raises:
            ConfigError: a run lies there and is not resumed.
            ShoalError: it cannot run.
        """

    def report(self, plan: Any, directory: Path) -> Report[Any]:
        """The report of what a run has done so far, from the events in its directory.

        Raises:
            StoreError: nothing can be said yet.
        """

    def predictions(self, plan: Any) -> Mapping[str, Interval]:
        """Quantity -> what the plan predicts of it; without a spread where it predicts none."""

    def describe(self, plan: Any) -> str:
        """The choices of a plan in a few words, which distinguish it from the others."""

    def results(self, report: Any, directory: Path) -> Sequence[Table | str]:
        """What people read below the comparison: other tables, and what lies where."""


_METHODS = ("plan", "run", "report", "predictions", "describe", "results")
_FACTS = (
    *("summary", "job_type", "plan_type", "report_type", "quantities", "flags", "subject"),
    "example",
)


@functools.cache
def kind_named(name: str) -> JobKind:
    """The kind of job of that name.

    Raises:
        UnknownPartError: there is none; with the nearest spelling.
        ConfigError: it does not follow :class:`JobKind`; says what is missing.
    """
    try:
        kind: JobKind = table("job").build(name, where="job")
    except (ImportError, AttributeError) as cause:  # another package
        raise ConfigError(
            f"job {name}: {table('job')[name]} cannot be imported: {cause}"
        ) from cause
    missing = [fact for fact in _FACTS if not hasattr(kind, fact)]
    missing += [f"{method}()" for method in _METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise ConfigError(
            f"job {name}: {table('job')[name]} is no kind of job: it has no {', '.join(missing)}; "
            "see shoal.ir.JobKind"
        )
    if not issubclass(kind.job_type, Job):
        raise ConfigError(
            f"job {name}: {table('job')[name]}: job_type = {kind.job_type!r}: expected a sub-class "
            "of shoal.ir.Job"
        )
    return kind


def kinds() -> dict[str, JobKind]:
    """Name -> kind, of all that follow the protocol."""
    return {name: kind_named(name) for name in table("job") if name not in broken_kinds()}


@functools.cache
def broken_kinds() -> dict[str, str]:
    """Name -> what is wrong with a kind that another package registered."""
    kinds = {}
    for name in table("job"):
        try:
            kind_named(name)
        except ShoalError as cause:
            kinds[name] = str(cause)
    return kinds


def kind_of(plan: Plan[Any]) -> JobKind:
    """The kind of a plan's job."""
    return kind_named(plan.job.job)


def defaults_of(kind: JobKind, job: Job, machine: Machine) -> Mapping[str, Any]:
    """Dotted path -> what a job usually is on a machine, in the place of the type's defaults."""
    method = getattr(kind, "defaults", None)
    return {} if method is None else method(job, machine)


def follower_of(name: str) -> RunFollower | None:
    """What reads the events of a run of the kind of that name; None where a page needs none."""
    if name not in table("job") or name in broken_kinds():
        return None
    method = getattr(kind_named(name), "follow", None)
    follower: RunFollower | None = None if method is None else method()
    return follower


def emits_of(kind: JobKind) -> str:
    """Kind of part that writes a kind's plans for other systems; empty where there is none."""
    chosen: Kind | None = getattr(kind, "emits", None)
    return "" if chosen is None else chosen.kind


def rank_options(kind: JobKind) -> tuple[str, ...]:
    """Names of the keywords of the kind's search."""
    method = getattr(kind, "rank", None)
    return () if method is None else tuple(inspect.signature(method).parameters)[2:]


def ranked(kind: JobKind, job: Job, machine: Machine, **options: Any) -> Sequence[Plan[Any]]:
    """All plans that a search finds, best first; those that ``kind.plan`` gives without a search.

    Args:
        kind: of the job.
        job: what is to be done.
        machine: where.
        **options: of the search, see :func:`rank_options`.

    Raises:
        PlanError: there is none.
    """
    method = getattr(kind, "rank", None)
    return kind.plan(job, machine) if method is None else method(job, machine, **options)


def plan_marks(plans: Sequence[Plan[Any]]) -> tuple[Mark, ...]:
    """What a terminal marks of ranked plans: the best one, and those that do not fit."""
    best: Mark = "headline" if plans[0].fits else "minor"
    return (best, *("" if plan.fits else "minor" for plan in plans[1:]))


def plan_tables(
    kind: JobKind, plans: Sequence[Plan[Any]], *, verbose: bool = False
) -> Sequence[Table | str]:
    """Ranked plans for people: tables and sentences in the order in which they are read."""
    method = getattr(kind, "tables", None)
    if method is not None:
        shown: Sequence[Table | str] = method(plans, verbose=verbose)
        return shown
    best, predicted = plans[0], kind.predictions(plans[0])
    headline = next((one for one in kind.quantities if one.headline), None)
    result: list[Table | str] = []
    if len(plans) > 1 and headline is not None:
        rows = []
        if headline.name in predicted:
            headline = headline.scaled_to(predicted[headline.name].value)
        for plan in plans:
            value = kind.predictions(plan).get(headline.name)
            text = "" if value is None else headline.text(value.value)
            rows.append((kind.describe(plan), "yes" if plan.fits else "no", text))
        columns = ("plan", "fits", headline.label)
        title = "plans, best first"
        marks = plan_marks(plans)
        result.append(
            Table(title=title, columns=columns, rows=tuple(rows), right="  r", marks=marks)
        )
    title = f"{kind.describe(best)} on {best.machine.name}"
    result.append(predicted_table(title, kind.quantities, predicted))
    if best.estimate is not None:
        result += best.estimate.tables()
    fits = "" if best.fits else "it does not fit"
    return [
        *result,
        *(line for line in (best.why, fits) if line),
        *map("note: {}".format, best.notes),
    ]


def predicted_table(
    title: str, quantities: Sequence[Quantity], predicted: Mapping[str, Interval]
) -> Table:
    """What a plan predicts: each quantity in its unit, with the 90 % interval."""
    rows = []
    for quantity in quantities:
        value = predicted.get(quantity.name)
        if value is not None:
            one = quantity.scaled_to(value.value)
            spread = f"{one.text(value.low)} to {one.text(value.high)}"
            rows.append(
                (one.label, one.text(value.value), spread if value.low < value.high else "")
            )
    return Table(
        title=title, columns=("", "predicted", "90 % interval"), rows=tuple(rows), right=" rr"
    )


def predictions(plan: Plan[Any]) -> Mapping[str, Interval]:
    """Quantity -> what a plan of any kind predicts of it."""
    return kind_of(plan).predictions(plan)


def errors_of(plan: Plan[Any], measured: Mapping[str, float]) -> dict[str, float]:
    """Quantity -> measured / predicted - 1, of what was both."""
    return {
        name: measured[name] / predicted.value - 1
        for name, predicted in predictions(plan).items()
        if name in measured and predicted.value
    }


def quantities(first: str = "") -> dict[str, Quantity]:
    """Every quantity of every kind by its name.

    Args:
        first: kind of job that words a quantity that several kinds share; the first of the table
            where it has none.
    """
    quantities: dict[str, Quantity] = {}
    for name in sorted(kinds(), key=lambda name: name != first):
        for quantity in kinds()[name].quantities:
            quantities.setdefault(quantity.name, quantity)
    return quantities


def compared(report: Report[Any]) -> list[tuple[str, str, str, str]]:
    """(quantity, predicted, measured, error) as people read them, of what a report measured."""
    kind = kind_of(report.plan)
    predicted = kind.predictions(report.plan)
    rows = []
    for quantity in kind.quantities:
        if quantity.name not in report.measured:
            continue
        before, error = predicted.get(quantity.name), report.errors.get(quantity.name)
        measured = report.measured[quantity.name]
        one = quantity.scaled_to(measured)
        rows.append(
            (
                one.label,
                "" if before is None else one.text(before.value),
                one.text(measured),
                "" if error is None else f"{100 * error:+.1f} %",
            )
        )
    return rows
