"""The catalogue: one row a paper, and what its claim must reach.

``catalogue.yaml`` states metrics, their thresholds, and what was tried where one is not reached;
an experiment states none of it. What a row has earned is in ``standing.py``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Self, TypeVar

from pydantic import PositiveInt, StringConstraints, model_validator

from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import Attempt, ClaimSamples, ExperimentContext, Metric, Status
from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, install
from shoal.core.files import read_yaml
from shoal.core.measure import num_cores
from shoal.core.native import compiler

FILE = Path(__file__).with_name("catalogue.yaml")

_T = TypeVar("_T")

Sentence = Annotated[str, StringConstraints(min_length=20, max_length=240, strip_whitespace=True)]


class ClaimChange(Value):
    """A threshold, a workload or a quantity that is not what it was at first.

    Args:
        what: the metric, or what else has changed.
        old: what it was.
        new: what it is.
        reason: why.
    """

    what: str
    old: str
    new: str
    reason: Sentence


class CatalogueRow(Value):
    """One system of the catalogue.

    Args:
        id: number of the row.
        name: short name of the system.
        title: the paper's title.
        year: the paper's year.
        says: what the paper claims, with its figures.
        checks: what is run here and when it counts.
        room: room of its main part.
        parts: places of its parts in the house.
        area: area it belongs to, the stem of its specification.
        status: always ``planned``; the rest is earned.
        claim: name of the experiment, once there is one.
        peers: who runs beside it in the same run, or why nobody does.
        metrics: what the experiment is judged by.
        changed: how its thresholds, workloads and quantities differ from those it began with.
        attempts: what was tried where a threshold is not reached.
    """

    id: int
    name: str
    title: str
    year: PositiveInt
    says: Sentence
    checks: Sentence
    room: str
    parts: tuple[str, ...]
    area: str
    status: Status = "planned"
    claim: str | None = None
    peers: str = ""
    metrics: tuple[Metric, ...] = ()
    changed: tuple[ClaimChange, ...] = ()
    attempts: tuple[Attempt, ...] = ()

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.metrics and not self.peers:
            raise ConfigError(f"row {self.id}: no peers; name them, or give the reason for none")
        return self


class _Catalogue(Value):
    systems: tuple[CatalogueRow, ...]


@functools.cache
def catalogue() -> tuple[CatalogueRow, ...]:
    """All rows, in order of their ids."""
    return parse(_Catalogue, read_yaml(FILE), where=FILE.name).systems


def row_of(number: int) -> CatalogueRow:
    """The row of this number.

    Raises:
        ConfigError: there is none.
    """
    for row in catalogue():
        if row.id == number:
            return row
    raise ConfigError(f"row {number}: not in {FILE.name}; its rows are 0 to {catalogue()[-1].id}")


class _Stated(Generic[_T]):
    """What the catalogue states of a claim, as an attribute of its class."""

    def __init__(self, read: Callable[[CatalogueRow], _T]) -> None:
        self._read = read

    def __get__(self, instance: BaseClaim | None, owner: type[BaseClaim]) -> _T:
        return self._read(row_of(owner.rows[0]))


class BaseClaim:
    """Base of the claims: thresholds are the catalogue's, what must be installed is checked here.

    A claim implements :meth:`collect`, and says in the line of its class:

    Args:
        row: number of its row of the catalogue.
        needs: modules without which it cannot run; ``c++`` for a compiler.
        cores: fewest processors.
    """

    rows: ClassVar[tuple[int, ...]]
    needs: ClassVar[tuple[str, ...]]
    cores: ClassVar[int]
    metrics = _Stated(lambda row: row.metrics)
    attempts = _Stated(lambda row: row.attempts)

    def __init_subclass__(cls, *, row: int, needs: tuple[str, ...] = (), cores: int = 1) -> None:
        cls.rows, cls.needs, cls.cores = (row,), needs, cores

    def refuses(self, context: ExperimentContext) -> str | None:
        """Why this claim cannot run here, or None."""
        for need in self.needs:
            if need == "c++":
                if compiler() is None:
                    return "no C++ compiler; install g++"
            elif importlib.util.find_spec(need) is None:
                extra = "run" if need == "torch" else "bench"
                return f"no {need}; {install(extra)} brings it"
        if num_cores() < self.cores:
            return f"{num_cores()} cores; it needs {self.cores}"
        return None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        run = ClaimRun(context, quick=quick, as_baseline=as_baseline)
        self.collect(run)
        return run.samples()

    def collect(self, run: ClaimRun) -> None:
        """Put the samples of every metric that is wanted, or a reason, into ``run``."""
