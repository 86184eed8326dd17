"""The code that a claim depends on: its experiment, what that imports, and what is near those.

A result is stale once this code has changed. Followed are imports of the experiment's own files,
and of each module that they import those from the same directory; the ground floors and the frame
of the claims are left out, because all claims stand on them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

from shoal.core.version import PACKAGE

_ROOT = PACKAGE
_EXPERIMENTS = _ROOT / "claims" / "experiments"
_GROUND = ("core", "ir")
_IMPORT = re.compile(
    r"""^\s*from (shoal[\w.]*) import (?:\(([^)]*)\)|(.*))|^\s*import (shoal[\w.]+)"""
    r"""|"(shoal\.[\w.]+):\w""",
    re.MULTILINE,
)
_SOURCE = re.compile(r'"(\w+\.(?:cpp|cu|h))"')
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_NOTHING = re.compile(rb"^\s*(#.*)?\n", re.MULTILINE)


@functools.cache
def code_digest(place: str) -> str:
    """sha256 of the code that a claim depends on, but for docstrings, comments and blank lines.

    Args:
        place: ``module:class`` of its experiment, as the table of claims has it.
    """
    digest = hashlib.sha256()
    for file in code_files(place):
        digest.update(file.relative_to(_ROOT).as_posix().encode())
        digest.update(_without_docstrings(file))
    return digest.hexdigest()


@functools.cache
def _without_docstrings(file: Path) -> bytes:
    """What a file says without blank lines, or what a Python module says to the interpreter."""
    text = file.read_bytes()
    if file.suffix != ".py":
        return _NOTHING.sub(b"", text)
    lines = text.splitlines(keepends=True)
    # Statements alone: an expression holds no docstring, and nine nodes of ten are in one.
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
                | ast.AsyncFunctionDef(body=[first, *_])
            ) if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                last = first.end_lineno or first.lineno
                lines[first.lineno - 1 : last] = [b"\n"] * (last - first.lineno + 1)
        for name in _BLOCKS:
            waiting += getattr(node, name, ())
    return _NOTHING.sub(b"", b"".join(lines))


def code_files(place: str) -> list[Path]:
    """Files of the code that a claim depends on, sorted; none for one of another package."""
    module = place.partition(":")[0]
    start, claim = _file_of(module), module.rpartition(".")[2]
    result: set[Path] = set()
    waiting = [] if start is None else [start]
    while waiting:
        file = waiting.pop()
        if file in result:
            continue
        result.add(file)
        own = file.parent == _EXPERIMENTS and file.stem.startswith(claim)
        waiting += [
            other
            for other in _imports(file)
            if (own or (file.parent == other.parent != _EXPERIMENTS)) and not _common(other)
        ]
    return sorted(result)


def _common(file: Path) -> bool:
    """Whether all claims stand on it."""
    room, *rest = file.relative_to(_ROOT).parts
    return room in _GROUND or (room == "claims" and len(rest) == 1)


@functools.cache
def _imports(file: Path) -> tuple[Path, ...]:
    """Modules of the package that are imported or named as ``module:attribute``; source files."""
    if file.suffix != ".py":
        return ()
    text = file.read_text(encoding="utf-8")
    names: set[str] = set()
    for module, several, one, whole, named in _IMPORT.findall(text):
        names.add(module or whole or named)
        names |= {f"{module}.{name}" for name in re.findall(r"\w+", several or one)}
    found = [_file_of(name) for name in names]
    found += [file.with_name(name) for name in _SOURCE.findall(text)]
    return tuple(path for path in found if path is not None and path.is_file())


def _file_of(module: str) -> Path | None:
    head, *rest = module.split(".")
    if head != "shoal" or not rest or not all(word.isidentifier() for word in rest):
        return None
    path = _ROOT.joinpath(*rest).with_suffix(".py")
    return path if path.is_file() else None
