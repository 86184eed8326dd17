"""What a parser of logs is, what it is given, and what it returns.

A parser makes templates of masked lines, such as ``Received block <*> of size <*>``. It reads them
once, in batches of any size, and what it returns does not depend on where these are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.core.config import Value

if TYPE_CHECKING:
    from shoal.ir import Estimate, Interval, Machine

WILDCARD = "<*>"
"""What stands in a template for a parameter, and in a masked line for what a mask matched."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class LogRates(Value):
    """How fast one core of a machine is.

    Args:
        read_s: seconds to cut a byte of text into lines, headers and columns.
        mask_s: seconds of one mask for a byte.
        tree_s: seconds of a masked line in the tree of Drain.
        python_s: seconds of one token in a parser that is written in Python.
        write_s: seconds of a line's parameters, found and written as Parquet.
        pack_s: seconds to pack a byte.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or derived from its description.
    """

    read_s: float
    mask_s: float
    tree_s: float
    python_s: float
    write_s: float
    pack_s: float
    spread: float
    measured: bool


class LogWork(Value):
    """What is parsed, as estimates see it.

    Args:
        num_bytes: of text, decompressed about.
        lines: about.
        tokens: of a line, about.
        distinct: share of the masked lines that is distinct, about.
        masks: how many.
    """

    num_bytes: float
    lines: float
    tokens: float
    distinct: float
    masks: int
    rates: LogRates


class MinedTemplates(NamedTuple):
    """What a parser found.

    Args:
        ids: int32 [groups], template of each number that ``add`` has returned.
        templates: text of each, tokens joined by a space, parameters as ``<*>``.
    """

    ids: Ints
    templates: list[bytes]


class TemplateMiner(Protocol):
    """A parser at work on one log."""

    def add(self, masked: Any) -> Ints:
        """Int32 [n]: a number for each line, whose template :meth:`finish` tells.

        Args:
            masked: Arrow array of large_binary, n masked lines.
        """

    def finish(self) -> MinedTemplates:
        """The templates of all lines so far; more lines may follow."""


@runtime_checkable
class LogParser(Protocol):
    """A part of kind ``log_parser``: one way to make templates of lines."""

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Seconds of the mining alone, and bytes of memory by cause."""

    def accuracy(self) -> Interval:
        """Grouping accuracy to expect: that published over sixteen systems of Loghub."""

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def suited(self, depth: int, similarity: float) -> Self:
        """The same with a format's own settings, where the user has given none."""

    def open(self) -> TemplateMiner:
        """Begin a log."""
