"""Learning curves as CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

from shoal.core.config import parse
from shoal.core.errors import DataError, UnknownKeyError
from shoal.cost.scaling.curve import CurvePoint

MAX_ROWS = 100_000


def read_curve(path: Path) -> list[CurvePoint]:
    """Points of a CSV file whose first line names the columns of :class:`CurvePoint`.

    ``size`` and ``value`` are needed; ``spread``, ``trials``, ``model`` and ``metric`` are
    optional, and so is every cell of theirs.

    Raises:
        DataError: the file cannot be read or has no such columns.
        ConfigError: a cell is not what its column wants; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            missing = {"size", "value"} - set(names)
            if missing:
                raise DataError(
                    f"{path}: no column {' and '.join(sorted(missing))}; the first line names the "
                    "columns: size,value and, if known, spread,trials,model,metric"
                )
            points = []
            for row in reader:
                if reader.line_num > MAX_ROWS:
                    raise DataError(f"{path}: more than {MAX_ROWS} lines, too many for a curve")
                where = f"{path}, line {reader.line_num}"
                if None in row:
                    raise UnknownKeyError(f"{where}: more cells than columns; remove the last")
                cells = {key: cell for key, cell in row.items() if cell not in ("", None)}
                points.append(parse(CurvePoint, cells, where=where))
            return points
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}: not text in UTF-8; give a CSV file") from cause
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror})") from cause
