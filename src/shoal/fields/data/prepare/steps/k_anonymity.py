"""k-anonymity: at least k rows have the same quasi-identifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, MinLen

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.counting import CellCounts
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import Learned, Preparation, PrepareRates
from shoal.fields.data.prepare.sketches import Sketches
from shoal.fields.data.readers import arrow


@part
class KAnonymity(Preparation):
    """Put ranges in the place of quasi-identifiers, so that every combination occurs k times.

    All combinations are cut in two at the median of their widest column, as long as both halves
    have k rows. Numbers become text such as ``[20, 35)``, texts become sets such as ``{a, b}``.
    Steps that leave out rows must come before. Text is ordered by the alphabet. All rows are
    counted, so there can be no held-out rows.

    Args:
        columns: the quasi-identifiers, such as age, sex and postal code.
        k: rows that share a combination, at least.

    Source: LeFevre, DeWitt, Ramakrishnan, Mondrian Multidimensional K-Anonymity, 2006 (strict).

    Differs: combinations are counted on a grid of at most 100,000 cells; numbers are rounded to the
    finest power of two that allows that.
    """

    counts_rows: ClassVar = True
    touches: ClassVar = "columns"

    columns: Annotated[tuple[str, ...], MinLen(1)]
    k: Annotated[int, Ge(2)] = 5

    def _rows(self, batch: PrepBatch) -> list[list[Any]]:
        if not batch.training:
            raise PrepareError("k_anonymity: held-out rows would not be counted; set holdout = 0")
        columns = []
        for name in batch.chosen(self.columns, "", "k_anonymity"):
            if batch.kind(name) == "number":
                columns.append([None if x != x else x for x in batch.numbers(name).tolist()])
            elif batch.kind(name) == "text":
                columns.append(batch.columns[name].to_pylist())
            else:
                raise PrepareError(
                    f"k_anonymity.columns: {name!r} is {batch.columns[name].type}; expected "
                    "numbers or text"
                )
        return columns

    def sketch(self, batch: PrepBatch) -> Sketches:
        """How often each combination occurs."""
        return {"grid": CellCounts.of(zip(*self._rows(batch), strict=True))}

    def learn(self, sketches: Sketches) -> Learned:
        """The cuts, as a tree, and the texts of each column in order.

        Raises:
            PrepareError: there are fewer than k rows.
        """
        grid = sketches.get("grid", CellCounts({}))
        assert isinstance(grid, CellCounts)
        rows = np.array(list(grid.cells.values()))
        if rows.sum() < self.k:
            raise PrepareError(f"k_anonymity.k = {self.k}: there are {rows.sum():,} rows only")
        columns = [list(one) for one in zip(*grid.cells, strict=True)]
        texts = {
            str(at): sorted({x for x in one if isinstance(x, str)})
            for at, one in enumerate(columns)
            if any(isinstance(x, str) for x in one)
        }
        codes = np.column_stack([_codes(one, texts.get(str(at))) for at, one in enumerate(columns)])
        tree: list[list[float]] = []
        labels: list[list[str]] = []
        self._cut(codes, rows, grid.level, texts, tree, labels)
        return {"level": grid.level, "texts": texts, "tree": tree, "labels": labels}

    def _cut(
        self,
        codes: np.ndarray,
        rows: np.ndarray,
        level: int,
        texts: Mapping[str, list[str]],
        tree: list[list[float]],
        labels: list[list[str]],
    ) -> None:
        """Append nodes [column, first code of the upper half, both children], and leaves."""
        whole = np.maximum(np.ptp(codes, axis=0), 1)
        tree.append([])
        waiting = [(0, np.arange(len(codes)))]
        while waiting:
            node, at = waiting.pop()
            cut = self._best(codes[at], rows[at], whole)
            if cut is None:
                tree[node] = [-1, len(labels)]
                labels.append(
                    [
                        _label(codes[at, column], level, texts.get(str(column)))
                        for column in range(codes.shape[1])
                    ]
                )
                continue
            column, first = cut
            below = codes[at, column] < first
            tree[node] = [column, first, len(tree), len(tree) + 1]
            waiting += [(len(tree), at[below]), (len(tree) + 1, at[~below])]
            tree += [[], []]

    def _best(
        self, codes: np.ndarray, rows: np.ndarray, whole: np.ndarray
    ) -> tuple[int, int] | None:
        """The column with the widest range that can be cut, and where."""
        for column in np.argsort(-np.ptp(codes, axis=0) / whole, kind="stable"):
            values, at = np.unique(codes[:, column], return_inverse=True)
            if len(values) < 2:
                continue
            below = np.cumsum(np.bincount(at, rows))[:-1]
            fair = np.flatnonzero((below >= self.k) & (rows.sum() - below >= self.k))
            if len(fair):
                best = fair[np.abs(below[fair] - rows.sum() / 2).argmin()]
                return int(column), int(values[best + 1])
        return None

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """The label of the leaf that each row lies in."""
        columns, fine = self._rows(batch), 2.0 ** -learned["level"]
        codes = []
        for at, one in enumerate(columns):
            cells = [int(np.floor(x * fine)) if isinstance(x, float) else x for x in one]
            codes.append(_codes(cells, learned["texts"].get(str(at))))
        leaf = np.zeros(batch.num_rows, int)
        waiting = [(0, np.arange(batch.num_rows))]
        while waiting:
            node, rows = waiting.pop()
            if not len(rows):
                continue
            cut = learned["tree"][node]
            if cut[0] < 0:
                leaf[rows] = cut[1]
                continue
            below = codes[cut[0]][rows] < cut[1]
            waiting += [(cut[2], rows[below]), (cut[3], rows[~below])]
        pa, changed = arrow(), {}
        for at, name in enumerate(self.columns):
            labels = pa.array([one[at] for one in learned["labels"]], pa.large_string())
            changed[name] = labels.take(pa.array(leaf))
        return batch.changed(changed)

    def _value_s(self, rates: PrepareRates) -> float:
        return 10 * rates.text_s


# Below all numbers of cells.
_NOTHING = -(2**62)


def _codes(cells: list[Any], texts: list[str] | None) -> np.ndarray:
    """Cells as whole numbers in order; what is missing comes first."""
    if texts is not None:
        known = {text: number for number, text in enumerate(texts)}
        return np.array([-1 if one is None else known[one] for one in cells], np.int64)
    return np.array([_NOTHING if one is None else one for one in cells], np.int64)


def _label(codes: np.ndarray, level: int, texts: list[str] | None) -> str:
    """What all cells of a leaf have in common."""
    low, high = int(codes.min()), int(codes.max())
    if texts is not None:
        return "{" + ", ".join("" if one < 0 else texts[one] for one in np.unique(codes)) + "}"
    step = 2.0**level
    begin = "missing" if low == _NOTHING else f"{low * step:.10g}"
    end = "missing" if high == _NOTHING else f"{(high + 1) * step:.10g}"
    return f"[{begin}, {end})"
