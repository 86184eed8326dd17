"""What a step of preparation is.

A step looks at rows through sketches, which merge, learns from them once, and then changes rows
batch by batch. What it has learned is JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from shoal.core.config import Value
from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.profile import ColumnProfile, TableProfile
from shoal.fields.data.prepare.sketches import Sketches
from shoal.ir import Estimate, Interval, Machine

MOST_CATEGORIES = 32
"""Categories of a column that the guide gives a column each."""

MOST_CLASSES = 32
"""Classes of a target of text by which categories can be encoded."""

MOST_COLUMNS = 64
"""Columns that the guide keeps where the memory has no room for more."""

Learned = Mapping[str, Any]
"""What a step has learned, as JSON."""


class PrepareRates(Value):
    """Seconds of one thread of a machine.

    Args:
        byte_s: to read a byte of a table.
        scan_s: to go over a number once.
        sort_s: to put a number into a t-digest.
        text_s: to look at a value of text.
        write_s: to write a number.
        measured: on this machine, or taken from a core of a server.
    """

    byte_s: float
    scan_s: float
    sort_s: float
    text_s: float
    write_s: float
    measured: bool


class PrepareWork(Value):
    """What the guide's rules and the steps' estimates read.

    Args:
        profile: of the data.
        target: column that is to be predicted; empty for none.
        memory: bytes that the prepared table may take, to be analysed in memory.
        rates: of the machine.
        seed: of the job.
    """

    profile: TableProfile
    target: str
    memory: float
    rates: PrepareRates
    seed: int = 1


class Reason(Value):
    """Why the guide has chosen a step.

    Args:
        measured: what was measured of the data.
        rule: which rule led from it to the step.
    """

    measured: str
    rule: str


@part
class Preparation(ABC):
    """A part of kind ``preparation``: one step.

    A class may have ``candidates(work, machine)``, which yields pairs of itself with options and
    the :class:`Reason`; the guide proposes what these yield, in the order of the table.
    """

    learns: ClassVar[bool] = True
    """Whether there is anything to fit; a pass over the data then."""
    drops_rows: ClassVar[bool] = False
    """Whether rows are left out."""
    counts_rows: ClassVar[bool] = False
    """Whether it promises something of all rows, so that none may be left out afterwards."""
    touches: ClassVar[str] = ""
    """Names the option with the columns that the step reads and writes; empty for all columns."""

    def sketch(self, batch: PrepBatch) -> Sketches:
        """What the step must know of a batch; sketches of one name merge."""
        return {}

    def learn(self, sketches: Sketches) -> Learned:
        """What the step does, of the merged sketches of all training rows."""
        return {}

    @abstractmethod
    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Change rows; the same for a row wherever it lies."""

    def estimate(self, work: PrepareWork, machine: Machine) -> Estimate:
        """Seconds to fit and to transform all rows in one thread, and bytes of what is kept."""
        columns = getattr(self, self.touches, ()) if self.touches else ()
        return self._estimate(work, len(columns) or len(work.profile.columns))

    def _estimate(self, work: PrepareWork, width: int) -> Estimate:
        seconds = work.profile.rows * width * self._value_s(work.rates)
        return Estimate(
            step_s=Interval.around(seconds, 1.0),
            terms_s={"data": seconds},
            memory_bytes={"runtime": 2.0**15 * width},
        )

    def _value_s(self, rates: PrepareRates) -> float:
        """Seconds per value; most steps look at each some times."""
        return 4 * rates.scan_s


def encodable(work: PrepareWork) -> bool:
    """Whether there is a target by which categories can be encoded: numbers, or some classes."""
    return any(
        one.name == work.target and (one.kind == "number" or one.distinct <= MOST_CLASSES)
        for one in work.profile.columns
    )


def width_of(work: PrepareWork) -> int:
    """Columns of the prepared table, about: numbers, and one for each of few categories."""
    texts = work.profile.texts(work.target)
    return max(1, len(work.profile.numbers(work.target)) + sum(map(columns_of, texts)))


def columns_of(one: ColumnProfile) -> int:
    """Columns that a column of text becomes."""
    return int(one.folded) if one.folded <= MOST_CATEGORIES else 8
