"""Ranked plans: in a terminal, in a notebook, in a program."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from shoal.core.config import ResolvedValue
from shoal.core.errors import ConfigError, PlanError
from shoal.core.extras import import_extra
from shoal.core.tables import Table, html, rich_table
from shoal.ir import Explanation, JobKind, Machine, Plan
from shoal.ir.job_kind import plan_tables, ranked
from shoal.plan.emit.write import emit

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]
    from rich.console import Console, ConsoleOptions, RenderableType

_SHOWN = 5
# Columns of a terminal that text fills.
_WIDTH = 80

P = TypeVar("P", bound=Plan[Any])


def _filled(sentence: str) -> str:
    """Lines that fit a terminal; commands and paths stay whole."""
    return textwrap.fill(
        sentence,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class Plans(Sequence[P], Generic[P]):
    """The plans of one job on one machine, best first.

    Args:
        kind: of the job.
        plans: at least one.
        resolved: the job as it was asked for, and why each value is what it is.
        search: options of the search.
        notes: about the answer as a whole.
    """

    def __init__(
        self,
        kind: JobKind,
        plans: Sequence[P],
        resolved: ResolvedValue[Any],
        *,
        search: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        self.kind, self.resolved = kind, resolved
        self.search, self.notes = dict(search), tuple(notes)
        self._plans = list(plans)

    @property
    def best(self) -> P:
        """The first one."""
        return self._plans[0]

    @property
    def job(self) -> Any:
        """The :class:`~shoal.ir.Job` that was asked for, with the defaults of the machine."""
        return self.resolved.value

    @property
    def machine(self) -> Machine:
        """What was planned for."""
        return self.best.machine

    @overload
    def __getitem__(self, place: int) -> P: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[P]: ...
    def __getitem__(self, place: int | slice) -> P | Sequence[P]:
        return self._plans[place]

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[P]:
        return iter(self._plans)

    # ------------------------------------------------------------------ what it rests on

    def taken(self) -> list[tuple[str, str, str]]:
        """(name, value, why) of what the answer rests on and a user may not have said."""
        leaves = {path: (value, why) for path, value, why in self.resolved.lines()}
        names = getattr(self.kind, "rests_on", None) or [
            path for path, (_, why) in leaves.items() if why != "default"
        ]
        rows = []
        for path in names:
            value, why = leaves.get(path, ("none", ""))
            final = self.best.job
            for step in path.split("."):
                final = getattr(final, step, None)
            if final is not None and path not in self.resolved.origins and str(final) != value:
                value, why = str(final), "from plan 1"
            if value != "none" or final is not None:
                rows.append((path, f"{int(value):,}" if value.isdigit() else value, why))
        return [*rows, *self._corrections()]

    def _corrections(self) -> Iterator[tuple[str, str, str]]:
        job: Any = self.best.job
        quantities = dict.fromkeys(one.quantity for one in self.machine.calibration or ())
        for quantity in quantities:
            one = self.machine.correction(job.engine, quantity, job.model)
            if one is not None:
                runs = f"{one.runs} run{'s' if one.runs > 1 else ''}"
                of = "" if one.model else " on other models"
                yield (
                    "calibration",
                    f"{quantity} {one.factor:.2f} from {runs}{of}",
                    "score --calibrate",
                )

    def taken_line(self) -> str:
        """The same in a sentence, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, value, why in self.taken():
            reason = "given" if why.startswith(("flag", "plan")) else why
            by_reason.setdefault(reason, []).append(f"{name} {value}")
        words = sorted(by_reason.items(), key=lambda item: item[0] != "given")
        return "settings: " + "; ".join(f"{', '.join(some)} ({why})" for why, some in words)

    # ------------------------------------------------------------------ what people read

    def tables(
        self, *, top: int = _SHOWN, verbose: bool = False, brief: bool = False
    ) -> Sequence[Table | str]:
        """Tables and sentences in the order in which people read them.

        Args:
            top: plans to show.
            verbose: with time and memory by cause.
            brief: the first table only.
        """
        blocks = plan_tables(self.kind, self._plans[:top], verbose=verbose)
        if brief:
            return [next(block for block in blocks if isinstance(block, Table))]
        return [
            _filled(block) if isinstance(block, str) else block
            for block in (self.taken_line(), *blocks)
        ]

    def __repr__(self) -> str:
        best = self.best
        many = f"{len(self)} plan{'s' if len(self) > 1 else ''}"
        return f"<{many} on {self.machine.name}; best: {self.kind.describe(best)}>"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        for block in [*self.tables(), *map("note: {}".format, self.notes)]:
            yield block if isinstance(block, str) else rich_table(block)

    def _repr_html_(self) -> str:
        pictures = getattr(self.kind, "pictures", None)
        drawn = [] if pictures is None else pictures(self._plans[:_SHOWN])
        drawn = [f'<div style="overflow-x:auto">{one}</div>' for one in drawn]
        return "\n".join([*map(html, self.tables()), *drawn])

    def to_pandas(self) -> DataFrame:
        """A row a plan: its choices, whether it fits, and each predicted quantity with its ends.

        Columns of a quantity are ``NAME``, ``NAME_low`` and ``NAME_high``, in the unit that the
        name says.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pandas = import_extra("pandas", extra="notebook", purpose="a data frame")
        rows = []
        for plan in self._plans:
            row: dict[str, Any] = {"plan": self.kind.describe(plan), "fits": plan.fits}
            for name, value in self.kind.predictions(plan).items():
                row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            rows.append(row)
        frame: DataFrame = pandas.DataFrame(rows)
        return frame

    # ------------------------------------------------------------------ what is written

    def save(self, path: str | PathLike[str]) -> None:
        """Write the best plan as YAML, for ``shoal.run`` or ``shoal train --plan``."""
        self.best.save(Path(path), header="The best plan of shoal plan.")

    def emit(
        self, engine: str, directory: str | PathLike[str] | None = None
    ) -> tuple[Plan[Any], dict[str, str]]:
        """Launch files of an engine, and the plan that they are of.

        The plans are those of :meth:`for_engine`; see :func:`shoal.plan.emit.write.emit`.
        """
        plans = self.for_engine(engine)
        return emit(plans, engine, None if directory is None else Path(directory))

    def for_engine(self, engine: str) -> Plans[Any]:
        """The plans of the same job, searched and priced as another engine runs it.

        Args:
            engine: such as torchtitan, megatron or vllm.

        Returns:
            These plans, where the job states its engine or nothing is known of that one.
        """
        if "engine" in self.resolved.origins:
            return self
        try:
            resolved = self.resolved.replace({"engine": engine}, f"emit {engine}")
        except ConfigError:
            return self
        plans = ranked(self.kind, resolved.value, self.machine, **self.search)
        return Plans(self.kind, plans, resolved, search=self.search, notes=self.notes)

    def explain(self) -> Explanation:
        """The chain of the best plan's price, from the machine's rates through every kernel.

        Raises:
            PlanError: no price of such a job is explained.
        """
        explain = getattr(self.kind, "explain", None)
        if explain is None:
            raise PlanError(f"a job of kind {self.best.job.job}: its price has no chain of kernels")
        explanation: Explanation = explain(self.best)
        return explanation
