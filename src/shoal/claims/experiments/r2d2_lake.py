"""A lake of Parquet files that grows from real tables of this machine.

Sources: the package index of apt, where there is one; the Unicode database; the standard library's
modules, functions, classes, imports and lines; files of this Python; tables that scikit-learn
ships; descriptors of photographs; and small tables of the standard library.
"""

from __future__ import annotations

import ast
import encodings.aliases
import errno
import html.entities
import http
import mimetypes
import shutil
import signal
import subprocess
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import open_atomic
from shoal.core.random import generator
from shoal.corpora.photos import photo_descriptors
from shoal.corpora.stdlib import Stdlib
from shoal.fields.data.readers import arrow

_ROWS = 40_000
_PACKAGE = ("Package", "Version", "Section", "Priority", "Maintainer", "Installed-Size", "Size")


def grow_lake(place: Path, count: int, *, seed: int) -> dict[str, int]:
    """Write tables until there are so many.

    Args:
        place: directory; what is there is removed.
        count: tables.
        seed: of everything random.

    Returns:
        How many tables each way has made.
    """
    shutil.rmtree(place, ignore_errors=True)
    draw = generator(seed, purpose="lake")
    tables = list(_base_tables())
    names = [name for name, _ in tables]
    made: dict[str, int] = {"base": len(tables)}
    while len(tables) < count:
        way = list(_WAYS)[int(draw.integers(len(_WAYS)))]
        at = int(draw.integers(len(tables)))
        grown = _WAYS[way](tables[at][1], draw, [table for _, table in tables])
        if grown is None or grown.num_rows == 0:
            continue
        tables.append((f"{names[at]}-{way}", grown))
        names.append(names[at])
        made[way] = made.get(way, 0) + 1
    for number, (name, table) in enumerate(tables[:count]):
        with open_atomic(place / f"{number:04}-{name}.parquet") as file:
            arrow("parquet").write_table(table, file, row_group_size=20_000)
    return made


# ---------------------------------------------------------------------------- ways to grow


def _select(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """Rows with a value up to some other."""
    name = table.schema.names[int(draw.integers(table.num_columns))]
    column = table.column(name)
    edge = column[int(draw.integers(table.num_rows))]
    if arrow("types").is_nested(column.type):  # lists have no order
        return None
    return table.filter(arrow("compute").less_equal(column, edge))


def _project(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """Some of the columns, at least half."""
    least = max(1, table.num_columns // 2)
    some = draw.permutation(table.num_columns)[: int(draw.integers(least, table.num_columns + 1))]
    return table.select(sorted(some.tolist()))


def _sample(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """Some of the rows, in another order."""
    rows = draw.permutation(table.num_rows)[: max(1, int(table.num_rows * draw.uniform(0.1, 0.9)))]
    return table.take(rows)


def _join(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """The rows of two tables with the same columns."""
    same = [other for other in all_ if other.schema.equals(table.schema)]
    other = same[int(draw.integers(len(same)))]
    joined = arrow().concat_tables([table, other])
    return joined if joined.num_rows <= 2 * _ROWS else None


def _rename(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """Names in capital letters, and columns in another order."""
    order = draw.permutation(table.num_columns).tolist()
    table = table.select(order)
    return table.rename_columns([name.upper() for name in table.schema.names])


def _near_miss(table: Any, draw: np.random.Generator, all_: Any) -> Any:
    """One cell changed to the value of another row."""
    at, other = (int(x) for x in draw.integers(0, table.num_rows, 2))
    place = int(draw.integers(table.num_columns))
    column = table.column(place)
    if column[at].equals(column[other]):
        return None
    changed = arrow().chunked_array(
        [
            *column.slice(0, at).chunks,
            *column.slice(other, 1).chunks,
            *column.slice(at + 1).chunks,
        ],
        column.type,
    )
    return table.set_column(place, table.schema.field(place), changed)


_WAYS: dict[str, Callable[[Any, np.random.Generator, Any], Any]] = {
    "select": _select,
    "project": _project,
    "sample": _sample,
    "join": _join,
    "rename": _rename,
    "near_miss": _near_miss,
}

# ---------------------------------------------------------------------------- real tables


def _base_tables() -> Iterator[tuple[str, Any]]:
    for name, rows in _rows().items():
        if rows:
            yield name, arrow().Table.from_pylist(rows[:_ROWS])
    yield from _arrays()


def _rows() -> dict[str, list[dict[str, Any]]]:
    result: dict[str, list[dict[str, Any]]] = {
        "unicode": [
            {
                "code": at,
                "name": unicodedata.name(chr(at), None),
                "category": unicodedata.category(chr(at)),
                "bidirectional": unicodedata.bidirectional(chr(at)),
                "combining": unicodedata.combining(chr(at)),
                "decomposition": unicodedata.decomposition(chr(at)),
                "numeric": unicodedata.numeric(chr(at), None),
            }
            for at in range(0x20000)
            if unicodedata.category(chr(at)) != "Cn"
        ],
        "case": [
            {"code": at, "upper": chr(at).upper(), "lower": chr(at).lower()}
            for at in range(0x11000)
            if chr(at).upper() != chr(at).lower()
        ],
        "entities": [{"entity": name, "text": text} for name, text in html.entities.html5.items()],
        "mime": [{"ending": k, "mime": v} for k, v in mimetypes.types_map.items()],
        "errors": [{"number": k, "symbol": v} for k, v in errno.errorcode.items()],
        "signals": [{"number": int(one), "signal": one.name} for one in signal.Signals],
        "status": [
            {"status": int(one), "phrase": one.phrase, "description": one.description}
            for one in http.HTTPStatus
        ],
        "codecs": [{"alias": k, "codec": v} for k, v in encodings.aliases.aliases.items()],
        "builtins": [
            {"builtin": name, "module": "sys", "callable": callable(getattr(sys, name))}
            for name in dir(sys)
        ],
        "config": [{"key": k, "value": str(v)} for k, v in sysconfig.get_config_vars().items()],
    }
    return {**result, **_code(), **_files(), **_packages()}


def _code() -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("modules", "functions", "classes", "imports", "lines")
    }
    for document in Stdlib().documents():
        text = document.text
        lines = text.split("\n")
        tables["lines"] += [
            {
                "module": document.name,
                "line": at,
                "indent": len(line) - len(line.lstrip()),
                "length": len(line),
            }
            for at, line in enumerate(lines)
        ]
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            continue
        row = {"module": document.name, "bytes": len(text), "num_lines": len(lines)}
        tables["modules"].append({**row, "nodes": len(nodes)})
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                arguments = len(node.args.args)
                doc = ast.get_docstring(node) is not None
                where = {"module": document.name, "name": node.name, "line": node.lineno}
                tables["functions"].append({**where, "arguments": arguments, "documented": doc})
            elif isinstance(node, ast.ClassDef):
                where = {"module": document.name, "class": node.name, "line": node.lineno}
                tables["classes"].append({**where, "bases": len(node.bases)})
            elif isinstance(node, ast.Import):
                tables["imports"] += [
                    {"module": document.name, "imports": one.name, "line": node.lineno}
                    for one in node.names
                ]
    return tables


def _files() -> dict[str, list[dict[str, Any]]]:
    root = Path(np.__file__).parent
    rows = []
    for path in sorted(root.rglob("*"))[:_ROWS]:
        if path.is_file():
            facts = path.stat()
            row = {"path": str(path.relative_to(root)), "ending": path.suffix}
            rows.append({**row, "size": facts.st_size, "mode": facts.st_mode & 0o777})
    return {"files": rows}


def _packages() -> dict[str, list[dict[str, Any]]]:
    if shutil.which("apt-cache") is None:
        return {}
    words = ["apt-cache", "dumpavail"]
    text = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120).stdout
    packages, needs = [], []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.split("\n") if ": " in line and line[0] != " "
        )
        if "Package" not in fields:
            continue
        packages.append(
            {
                name: int(fields[name])
                if name.endswith("Size") and name in fields
                else fields.get(name)
                for name in _PACKAGE
            }
        )
        needs += [
            {"package": fields["Package"], "needs": one.split()[0], "alternative": "|" in one}
            for one in fields.get("Depends", "").split(", ")
            if one
        ]
    return {"packages": packages, "dependencies": needs}


def _arrays() -> Iterator[tuple[str, Any]]:
    from sklearn import datasets

    for name in ("iris", "wine", "diabetes", "breast_cancer", "digits", "linnerud"):
        bunch = getattr(datasets, f"load_{name}")()
        names = [str(one).replace(" ", "_") for one in bunch.feature_names]
        columns = {one: bunch.data[:, at] for at, one in enumerate(names)}
        if bunch.target.ndim == 1:
            columns["target"] = bunch.target
        yield name, arrow().table(columns)
    photos = photo_descriptors(5000).vectors
    yield "photos", arrow().table({f"d{at:03}": photos[:, at] for at in range(32)})
