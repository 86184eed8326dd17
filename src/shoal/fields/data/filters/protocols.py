"""What a filter of text is, what it is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.fields.data.filters import statistics
from shoal.fields.data.filters.statistics import Columns, Ints
from shoal.fields.data.readers import arrow

if TYPE_CHECKING:
    from shoal.fields.data.curate.protocols import CurateWork
    from shoal.ir import Estimate, Machine


class FilterBatch:
    """The texts of some rows, and which rows are still in.

    Args:
        texts: an array of Arrow, ``string`` or ``large_string``; a null is an empty text.

    Attributes:
        texts: ``large_string`` [n], without nulls.
        alive: bool [n], the rows that no filter has dropped.
    """

    def __init__(self, texts: Any) -> None:
        self.texts = texts.cast(arrow().large_string()).fill_null("")
        self.alive = np.ones(len(texts), bool)

    def columns(self, among: npt.NDArray[np.bool_] | None = None) -> Columns:
        """The texts as memory, with the rows that are in.

        Args:
            among: bool [n], of which rows; None for all.
        """
        alive = self.alive if among is None else self.alive & among
        return statistics.columns_of(self.texts, alive)

    def replace(self, texts: Any) -> None:
        """Put other texts in the place of these.

        Args:
            texts: ``large_string`` [n], without nulls.
        """
        self.texts = texts


class FilterVerdict(NamedTuple):
    """What a filter says of a batch.

    Args:
        broken: int64 [n], the place among the filter's ``reasons`` of the first that holds; -1
            where none does, and the row is kept.
        texts: what the texts are now, ``large_string`` [n]; None where none has changed.
        counts: what else was counted, such as e-mail addresses that were replaced.
    """

    broken: Ints
    texts: Any = None
    counts: Mapping[str, int] = {}


def first_broken(n: int, rules: Sequence[npt.NDArray[np.bool_]]) -> Ints:
    """Of rules that drop, the place of the first that holds for each row; -1 for none.

    Args:
        n: rows.
        rules: bool [n] each.
    """
    return np.select(rules, [np.int64(at) for at in range(len(rules))], np.int64(-1))


def named(names: Sequence[str], counts: Ints) -> dict[str, Ints]:
    """Name -> int64 [n], of counts [n, names]."""
    return dict(zip(names, counts.T, strict=True))


def ratio(part: Ints, whole: Ints) -> npt.NDArray[np.float64]:
    """Part over whole, 0 where the whole is."""
    return part / np.maximum(whole, 1)


@runtime_checkable
class TextFilter(Protocol):
    """A part of kind ``text_filter``: one family of rules.

    Attributes:
        reasons: why it drops a row, in the order in which the rules are tried.
    """

    reasons: ClassVar[tuple[str, ...]]

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Seconds of this filter over all texts, and bytes of what it holds."""

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """Say which rows to drop, and what the texts become; rows that are out do not count.

        Raises:
            DataError: what it compares with cannot be read.
        """
