"""A table as a value: what a part or a job shows, before it is drawn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from shoal.core.config import Value
from shoal.core.theme import STYLES, Mark


class Table(Value):
    """Rows under columns.

    Args:
        title: what it says; empty for none.
        columns: headings; empty strings for none.
        rows: cells, as text.
        right: an ``r`` for each column that is aligned to the right, a space for others.
        marks: what each row is, for a terminal; none for rows that are nothing special.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: str = ""
    marks: tuple[Mark, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """A mapping of columns for each row, for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def only(self, *columns: str) -> Table:
        """The table with those columns of it that are named, in its own order."""
        kept = [place for place, name in enumerate(self.columns) if name in columns]
        right = self.right.ljust(len(self.columns))
        return self.model_copy(
            update={
                "columns": tuple(self.columns[place] for place in kept),
                "rows": tuple(tuple(row[place] for place in kept) for row in self.rows),
                "right": "".join(right[place] for place in kept),
            }
        )


class ShownAsTables(ABC):
    """What a terminal and a notebook show as the tables and sentences of :meth:`tables`."""

    @abstractmethod
    def tables(self) -> Iterable[Table | str]:
        """In the order in which people read them."""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for block in self.tables():
            yield block if isinstance(block, str) else rich_table(block)

    def _repr_html_(self) -> str:
        return "\n".join(map(html, self.tables()))


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: str = ""
) -> Table:
    """A table of anything that has a text; None is an empty cell."""
    cells = tuple(tuple("" if cell is None else str(cell) for cell in row) for row in rows)
    return Table(title=title, columns=tuple(columns), rows=cells, right=right)


def digits(number: float) -> str:
    """A number with three significant digits; all of them before the point."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    # Rounded first: 99.96 is 100, not 100.0.
    places = 2 - int(f"{number:.2e}".partition("e")[2])
    return f"{round(number, places):,.{max(0, places)}f}"


def cut(text: str, most: int) -> str:
    """The text, or as much of its beginning as so many characters hold, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def scale_of(value: float, units: Mapping[str, float]) -> tuple[str, float]:
    """The largest of some units of which a value has at least two, and its size.

    Args:
        value: in the unit of the sizes.
        units: name -> size, largest first; the last one is taken where none fits.
    """
    for name, size in units.items():
        if value >= 2 * size:
            return name, size
    return name, size


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share in percent: tenths, and three digits from 100 %; empty for None."""
    if share is None:
        return ""
    number = f"{100 * share:.1f}" if abs(share) < 1 else digits(100 * share)
    return f"{'+' * (sign and share >= 0)}{number} %"


SECONDS = {"days": 86400.0, "hours": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
JOULES = {"MWh": 3.6e9, "kWh": 3.6e6, "kJ": 1e3, "J": 1.0}


def shares(parts: Mapping[str, float], *, least: float = 0.005) -> str:
    """What a whole is made of, largest part first: ``matmul 65 %, memory 17 %``.

    Args:
        parts: name -> amount.
        least: share of the smallest part that is named.
    """
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{k} {v / whole:.0%}" for k, v in ordered if whole and v / whole >= least)


def without_empty(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: str,
    marks: Sequence[Mark] = (),
) -> Table:
    """A table without the columns in which no row has anything."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return Table(
        title=title,
        columns=tuple(columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in rows),
        right="".join(right.ljust(len(columns))[i] for i in kept),
        marks=tuple(marks),
    )


def rich_table(table: Table, *, titled: bool = True) -> Any:
    """The table as rich draws it, a ``rich.table.Table``; its words are no markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn
    from rich.text import Text

    headed = any(table.columns)
    drawn = Drawn(
        box=SIMPLE_HEAD if headed else None,
        show_header=headed,
        pad_edge=False,
        padding=(0, 1 if headed else 2, 0, 0),  # a box is a column wide
        title=table.title if titled and table.title else None,
        title_justify="left",
        title_style=STYLES["title"],
    )
    for index, column in enumerate(table.columns):
        right = table.right[index : index + 1] == "r"
        drawn.add_column(Text(column), justify="right" if right else "left", overflow="fold")
    for place, row in enumerate(table.rows):
        mark = table.marks[place] if place < len(table.marks) else ""
        drawn.add_row(*map(Text, row), style=STYLES[mark])
    return drawn


def html(block: Table | str) -> str:
    """A table, or a sentence, as a fragment of HTML."""
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    sides = ["right" if side == "r" else "left" for side in block.right.ljust(len(block.columns))]

    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{inner}</tr>"

    head = f"<thead>{row(block.columns, 'th')}</thead>" if any(block.columns) else ""
    body = "".join(row(cells, "td") for cells in block.rows)
    title = f"<caption>{escape(block.title)}</caption>" if block.title else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"
