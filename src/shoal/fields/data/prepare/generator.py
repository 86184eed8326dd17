"""A table with everything that is wrong with tables, of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.readers import BadRowCount, arrow

_SHARD = 2**17
_CITIES = ("Oslo", "oslo ", "Bergen", "BERGEN", "Tromsø", "Bodø", None)


def dirty_batch(rows: int, seed: int, number: int) -> Any:
    """A record batch of Arrow.

    ``age`` has missing values, ``income`` is skewed with outliers, ``height`` is text in metres and
    centimetres, ``city`` has several spellings, ``shop`` 300 categories, ``id`` is another in every
    row, ``unit`` constant, and ``empty`` is; ``y`` follows from the others.
    """
    random = generator(seed, purpose="dirty table", step=number)
    age, shop = random.normal(45, 12, rows), random.integers(0, 300, rows)
    income = random.lognormal(10, 0.8, rows)
    height, city = random.normal(1.75, 0.1, rows), random.integers(0, len(_CITIES), rows)
    y = age / 12 + np.log(income) + (shop % 7) + 4 * height + random.normal(0, 1, rows)
    age[random.random(rows) < 0.1] = np.nan
    income[random.random(rows) < 0.005] *= 1000
    metric = random.random(rows) < 0.3
    heights = [
        f"{h:.3f} m" if m else f"{100 * h:.1f}cm" for h, m in zip(height, metric, strict=True)
    ]
    columns = {
        "id": [f"row-{number}-{at}" for at in range(rows)],
        "age": age,
        "income": income,
        "height": heights,
        "city": [_CITIES[at] for at in city],
        "shop": [f"shop {at}" for at in shop],
        "unit": ["kr"] * rows,
        "empty": np.full(rows, np.nan),
        "y": y,
    }
    pa = arrow()
    return pa.record_batch([pa.array(one) for one in columns.values()], list(columns))


@dataclass(frozen=True)
class DirtyShard:
    """Some rows of such a table.

    Args:
        num_rows: of them.
        number: place among the shards.
        seed: of the table.
    """

    num_rows: int
    number: int
    seed: int

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """(column, type)."""
        return tuple((one.name, one.type) for one in dirty_batch(1, 0, 0).schema)

    def batches(self, rows: int, *, bad: BadRowCount | None = None) -> Iterator[Any]:
        """Record batches of at most so many rows."""
        whole = dirty_batch(self.num_rows, self.seed, self.number)
        for first in range(0, self.num_rows, rows):
            yield whole.slice(first, rows)


def dirty_shards(rows: int, seed: int) -> list[DirtyShard]:
    """Pieces of a table of so many rows."""
    return [
        DirtyShard(min(_SHARD, rows - begin), number, seed)
        for number, begin in enumerate(range(0, rows, _SHARD))
    ]
