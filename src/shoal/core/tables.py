"""A table as a value: what a part or a job shows, before it is drawn."""

from __future__ import annotations

from typing import Any

from shoal.core.config import Value

__all__ = ["Table"]


class Table(Value):
    """Rows under columns.

    Args:
        title: what it says; empty for none.
        columns: headings; empty strings for none.
        rows: cells, as text.
        right: an ``r`` for each column that is aligned to the right, a space for others.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: str = ""

    def records(self) -> list[dict[str, Any]]:
        """A mapping of columns for each row, for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]
