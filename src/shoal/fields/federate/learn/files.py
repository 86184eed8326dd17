"""A table of the user's: columns of numbers, a label, and perhaps who owns each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Lt

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.learn.sources import held_out


@part
class TableFile:
    """A file or directory of Parquet, CSV or JSON lines, whose rows are examples.

    Features are scaled to mean 0 and deviation 1 over all rows.

    Args:
        path: of it.
        label: column of the class of a row, of any type.
        features: columns of numbers; empty for all that are numbers, but for label and owner.
        owner: column of who has the row, for the partition ``natural``; empty for none.
        test: share that the server tests on.
    """

    path: str
    label: str
    features: tuple[str, ...] = ()
    owner: str = ""
    test: Annotated[float, Gt(0), Lt(1)] = 0.2

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Rows float32 [N, F], classes in the order of their values.

        Raises:
            DataError: a column is missing, has no numbers, gaps or values that are not finite, or
                there is one class only.
        """
        from shoal.fields.data.readers import arrow
        from shoal.fields.data.sources import open_source

        names = open_source(self.path).schema.names
        wanted = [self.label, *self.features, *([self.owner] if self.owner else [])]
        for name in wanted:
            if name not in names:
                raise DataError(
                    f"data file: {self.path} has no column {name!r}; it has {', '.join(names)}"
                )
        if len(set(wanted)) < len(wanted):
            raise DataError("data file: label, features and owner name a column twice")
        columns = wanted if self.features else names
        source = open_source(self.path, columns=columns)
        batches = list(source.batches())
        if not batches:
            raise DataError(f"data file: {self.path} has no rows")
        table = arrow().Table.from_batches(batches)
        others = {self.label, self.owner}
        chosen = self.features or tuple(
            field.name
            for field in table.schema
            if field.name not in others and _is_number(field.type)
        )
        if not chosen:
            raise DataError(f"data file: {self.path} has no column of numbers; give features")
        x = np.stack([self._numbers(table, name) for name in chosen], axis=1)
        labels, y = self._codes(table, self.label)
        if len(labels) < 2:
            raise DataError(
                f"data file: column {self.label!r} has one value, {labels[0]!r}; there is nothing "
                "to learn"
            )
        owner = self._codes(table, self.owner)[1] if self.owner else np.empty(0, np.int64)
        spread = x.std(0)
        x = (x - x.mean(0)) / np.where(spread > 0, spread, 1.0)
        whole = Examples(x=x.astype(np.float32), y=y, classes=len(labels), owner=owner)
        return held_out(whole, self.test, seed)

    def _numbers(self, table: Any, name: str) -> np.ndarray:
        column = table.column(name)
        if not _is_number(column.type):
            raise DataError(f"data file: column {name!r} is {column.type}; features are numbers")
        values = np.asarray(column.to_numpy(), np.float64)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                f"data file: column {name!r} has {len(wrong)} values that are missing or not "
                f"finite, the first in row {wrong[0] + 1}; fill or drop them before"
            )
        return values

    def _codes(self, table: Any, name: str) -> tuple[Sequence[Any], np.ndarray]:
        """Its values in their order, and the place of each row's among them."""
        values = table.column(name).to_pylist()
        if any(value is None or value != value for value in values):
            raise DataError(f"data file: column {name!r} has rows without a value")
        known = sorted(set(values), key=lambda value: (str(type(value)), value))
        place = {value: at for at, value in enumerate(known)}
        return known, np.array([place[value] for value in values], np.int64)


def _is_number(kind: Any) -> bool:
    from shoal.fields.data.readers import arrow

    types = arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
