"""The source files of the package, each read and parsed once a process, whoever asks."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import shoal

PACKAGE = Path(shoal.__file__).parent


@functools.cache
def paths() -> tuple[Path, ...]:
    """Every source file of the package, sorted."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def text(path: Path) -> str:
    """What a file says."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    """A parsed file; nobody may change it."""
    with _no_collections():
        return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a parsed file but contexts, breadth first as :func:`ast.walk` gives them."""
    with _no_collections():
        found: list[ast.AST] = [tree(path)]
        for node in found:
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    found += [item for item in value if isinstance(item, ast.AST)]
                elif isinstance(value, ast.AST) and name != "ctx":
                    found.append(value)
        return tuple(found)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Trees have no garbage, and two million nodes to be searched for it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
