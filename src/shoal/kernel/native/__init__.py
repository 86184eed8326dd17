"""The C++ sources of the kernels, built when one is first needed.

Threads are those of PyTorch: both use the OpenMP runtime that PyTorch has loaded, and so one
pool, whose size ``torch.set_num_threads`` sets. Import torch before a library is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.core.native import build

__all__ = ["FLAGS", "declared", "function", "libraries", "library", "recorded_by"]

FLAGS = ("-fopenmp", "-ffp-contract=fast")

# These sources say themselves what is done by vectors. That loops of few rounds are written out
# is what most of them need of -O3, which takes the compiler a third longer.
_LEVEL = ("-O2", "-fpeel-loops")
_LEVELS = {
    "planes": ("-O3",),  # would be up to 1.9 times as slow
    "strided": ("-O3",),
    "views": ("-O3",),
    "recurrence_fp64": ("-O1",),  # the type in which the others are checked
}

_INCLUDE = re.compile(r'^#include "([a-z0-9_]+\.h)"$', re.MULTILINE)


def _text(name: str) -> str:
    """A source with the headers of this directory put in their places, each once."""
    seen: set[str] = set()

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda found: read(found[1]), text)

    return read(f"{name}.cpp")


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The built library of ``name``.cpp of this directory.

    Raises:
        BuildError: there is no compiler, or it refuses the source.
    """
    import torch  # noqa: F401 - brings the OpenMP runtime that the library shares

    flags = (*FLAGS, *_LEVELS.get(name, _LEVEL))
    return build(_text(name), name=f"kernel-{name}", flags=flags)


def libraries() -> tuple[str, ...]:
    """Names of all libraries; the largest sources, which take longest to compile, come first."""
    names = [path.stem for path in Path(__file__).parent.glob("*.cpp")]
    return tuple(sorted(names, key=lambda name: (-len(_text(name)), name)))


_TYPES = {
    "a": ctypes.c_void_p,
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


# (function, letters of its arguments, letter of its result, what it is given)
Note = Callable[[Any, str, str, Sequence[Any]], None]


class _Notes(threading.local):
    """The function that receives the calls of this thread."""

    note: Note | None = None


_NOTES = _Notes()


@contextlib.contextmanager
def recorded_by(note: Note) -> Iterator[None]:
    """Report every call that this thread makes of these functions, before it is made."""
    before, _NOTES.note = _NOTES.note, note
    try:
        yield
    finally:
        _NOTES.note = before


@functools.cache
def function(name: str, symbol: str, arguments: str, result: str = "") -> Callable[..., Any]:
    """A function of a library, its types declared.

    Args:
        name: of the library.
        symbol: of the function.
        arguments: a letter each: p pointer, l int64, i int, f float, d double, a the address of
            an array.
        result: the same, or empty.
    """
    return declared(getattr(library(name), symbol), arguments, result)


def declared(found: Any, arguments: str, result: str = "") -> Callable[..., Any]:
    """A function of C of these types, whose calls are reported; see :func:`function`."""
    found.argtypes = [_TYPES[letter] for letter in arguments]
    found.restype = _TYPES[result] if result else None
    arrays = "a" in arguments

    def call(*given: Any) -> Any:
        if _NOTES.note is not None:
            _NOTES.note(found, arguments, result, given)
        if arrays:
            given = tuple(
                value.buffer_info()[0] if isinstance(value, array) else value for value in given
            )
        return found(*given)

    return call
