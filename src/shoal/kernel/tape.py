"""Calls of kernels, written down once and then made by one call: no interpreter between them.

A step of a model asks some two hundred kernels, and of a small model each takes less time than
Python needs to ask it. What is asked is the same in every step of as many tokens: the same
functions at the same addresses. So one such step is recorded, with tensors in memory of its own,
and played again with other numbers in its inputs, as a CUDA graph is.

Only the kernels of this room are written down. An operator of PyTorch that computes something
leaves the recording without use, and so does what it does not see: a tape is checked once.

Source of the idea: CUDA graphs; NVIDIA, CUDA C++ Programming Guide.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.kernel.native import function, recorded_by
from shoal.kernel.operators import OperatorMode

_WORDS, _FLOATS, _LINE = 16, 4, 64
_ALLOCATES = ("aten::new_empty", "aten::empty.memory_format")


class _Call(ctypes.Structure):
    """As ``native/tape.cpp`` has it."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("words", ctypes.c_int64 * _WORDS),
        ("floats", ctypes.c_float * _FLOATS),
        ("checked", ctypes.c_int64),
    ]


class RecordedPass(Protocol):
    """What was recorded: a :class:`Tape`, several, or a graph of :mod:`shoal.kernel.graph`."""

    @property
    def result(self) -> Tensor:
        """What is computed, where it is written."""

    def play(self) -> bool:
        """Compute again; False where a kernel refused what its inputs hold now."""


class Tape:
    """Recorded calls, and the memory that they read and write.

    Args:
        calls: in order.
        result: what the recorded function returned; played calls write there.
        kept: owners of memory that the calls use.
    """

    def __init__(self, calls: Sequence[_Call], result: Tensor, kept: object) -> None:
        self._calls = (_Call * len(calls))(*calls)
        self._at = ctypes.addressof(self._calls)
        self._kept = kept
        self._play = function("tape", "tape_play", "pl", "l")
        self.result = result

    def __len__(self) -> int:
        return len(self._calls)

    def play(self) -> bool:
        """Make the calls; false where one of them refused what its inputs hold now."""
        return bool(self._play(self._at, len(self._calls)) < 0)


class _Recorder(OperatorMode):
    """Sees what PyTorch is asked for, and gives tensors that stay where they are.

    What is not used any more serves the next of its size, as in every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.kept: list[object] = []
        self.foreign: str | None = None
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def note(self, called: Any, arguments: str, result: str, given: Sequence[Any]) -> None:
        """A kernel's function is about to be called."""
        words = [value for kind, value in zip(arguments, given, strict=True) if kind in "apli"]
        floats = [value for kind, value in zip(arguments, given, strict=True) if kind == "f"]
        if (
            result not in ("", "l")
            or "d" in arguments
            or len(words) > _WORDS
            or len(floats) > _FLOATS
        ):
            self.foreign = self.foreign or f"{called.__name__}, which has other argument types"
            return
        self.kept += [value for value in words if isinstance(value, array)]
        addresses = [
            value.buffer_info()[0] if isinstance(value, array) else value or 0 for value in words
        ]
        self.calls.append(
            _Call(
                ctypes.cast(called, ctypes.c_void_p).value,
                (ctypes.c_int64 * _WORDS)(*addresses),
                (ctypes.c_float * _FLOATS)(*floats),
                int(result == "l"),
            )
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """An operator of PyTorch: an allocation, a view, or one that cannot be recorded."""
        out = func(*args, **(kwargs or {}))
        if func.name() in _ALLOCATES:
            return self._empty(out.shape, out.dtype)
        views = out if isinstance(out, list | tuple) else (out,)
        if not (func.is_view and all(_shares(view, args[0]) for view in views)):
            self.foreign = self.foreign or func.name()
        return out

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        nbytes = max(1, shape.numel() * dtype.itemsize)
        free = self._free[nbytes]
        if free:
            block = free.pop()
        else:
            block = torch.empty(nbytes + _LINE, dtype=torch.uint8)
            self.kept.append(block)
        first = -block.data_ptr() % _LINE
        held: np.ndarray = block.numpy()[first : first + nbytes]
        weakref.finalize(held, free.append, block).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)


def _shares(view: Tensor, of: object) -> bool:
    return (
        isinstance(of, Tensor)
        and view.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    )


def record(compute: Callable[[], Tensor]) -> tuple[Tensor, Tape | str]:
    """Compute something, and write down which kernels were asked.

    Args:
        compute: reads and writes tensors that stay where they are, and only those and its own.

    Returns:
        What it returned, and the tape, or why there is none.
    """
    recorder = _Recorder()
    with recorded_by(recorder.note), recorder:
        result = compute()
    if recorder.foreign is None and not _knows_calls():
        recorder.foreign = "the calling convention of this system"
    if recorder.foreign is not None:
        return result, recorder.foreign
    return result, Tape(recorder.calls, result, (recorder.kept, compute))


def _knows_calls() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"
