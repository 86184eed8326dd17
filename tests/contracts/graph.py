"""The graph of the modules of the package, read from their text.

Imports count wherever they stand: at the top, in a function, under ``TYPE_CHECKING``. A string
counts when it names a module (``"shoal.x.y"``, as for ``python -m``) or something in one
(``"shoal.x.y:Name"``), and so does a folder of programs (``Path(__file__).parent / "drivers"``).
A name that a package takes from one of its modules leads to that module. The strings of a table
of parts belong to the kind, ``kind:K``, which leads to the parts; who builds parts of a kind,
or has a key for them, leads to the kind.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import sources

from shoal.core.parts import KINDS, table

NAMED = re.compile(r"(shoal(?:\.\w+)*)(?::([\w.]+))?")
TABLES = {place.replace(":", "."): kind for kind, place in KINDS.items()}
# What chooses the parts of a kind, given its name.
CHOOSERS = ("shoal.core.parts.table", "shoal.core.config.Kind")


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module and package."""
    modules = {}
    for path in sources.paths():
        parts = ("shoal", *path.relative_to(sources.PACKAGE).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def nodes(module: str) -> tuple[ast.AST, ...]:
    return sources.nodes(modules()[module])


@functools.cache
def imported(module: str) -> dict[str, str]:
    """Name in a module -> what it is imported from, dotted."""
    result = {}
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                result[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return result


def place_of(module: str, name: str) -> str:
    """Where ``name`` of ``module`` is from: a module, or ``kind:K`` of a table of parts."""
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    if f"{module}.{name}" in TABLES:
        return f"kind:{TABLES[f'{module}.{name}']}"
    source, _, original = imported(module).get(name, "").rpartition(".")
    package = modules()[module].name == "__init__.py"
    return place_of(source, original) if package and source in modules() else module


def in_tables(module: str) -> set[ast.AST]:
    """Everything inside the tables of parts of a module."""
    return {
        inner
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "PartTable"
        for inner in ast.walk(node)
    }


def fitting(node: ast.JoinedStr) -> Iterator[str]:
    """Modules that an f-string may name: those that its constant pieces fit."""
    pieces = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
    if (pieces[0] or "").startswith("shoal."):
        pattern = "".join(r"\w+" if piece is None else re.escape(piece) for piece in pieces)
        yield from (name for name in modules() if re.fullmatch(pattern, name))


@functools.cache
def edges(module: str) -> tuple[tuple[int, str], ...]:
    """(line, module or ``kind:K``) of everything that a module names."""
    return tuple(_edges(module))


def _edges(module: str) -> Iterator[tuple[int, str]]:
    listed = in_tables(module)
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            yield from ((node.lineno, place_of(node.module, each.name)) for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in listed:
            match = NAMED.fullmatch(node.value)
            if match and match[1] in modules():
                name = (match[2] or "").partition(".")[0]
                yield node.lineno, place_of(match[1], name) if name else match[1]
        elif isinstance(node, ast.JoinedStr):
            yield from ((node.lineno, name) for name in fitting(node))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _of_file(node.left):
            folder = f"{module.rpartition('.')[0]}.{getattr(node.right, 'value', '')}."
            yield from ((node.lineno, name) for name in modules() if name.startswith(folder))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            kind = getattr(node.args[0], "value", None)
            if imported(module).get(node.func.id) in CHOOSERS and kind in KINDS:
                yield node.lineno, f"kind:{kind}"


def _of_file(node: ast.expr) -> bool:
    """Whether ``__file__`` is in an expression."""
    names = (getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node))
    return "__file__" in names


@functools.cache
def leads_to(place: str) -> frozenset[str]:
    """What a module or a kind names. The list of all kinds names every table and chooses none."""
    if place.startswith("kind:"):
        kind = place.removeprefix("kind:")
        named = (table(kind).protocol, *table(kind).values())
        return frozenset(one.partition(":")[0] for one in named)
    leads = frozenset(to for _, to in edges(place))
    if place == "shoal.core.parts":
        return frozenset(to for to in leads if not to.startswith("kind:"))
    return leads


def reached(roots: Sequence[str], without: str = "-") -> set[str]:
    """What is reached from ``roots``, not passing through modules below ``without``."""
    names: set[str] = set()
    left = list(roots)
    while left:
        place = left.pop()
        if place not in names and not f"{place}.".startswith(f"{without}."):
            names.add(place)
            left += leads_to(place)
    return names
