"""STREAM: copy, scale, add and triad, by the algorithms and by plain C with OpenMP.

Source: McCalpin, Memory Bandwidth and Machine Balance in Current High Performance Computers, 1995.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core.measure import interleave
from shoal.core.native import build
from shoal.kernel.algorithms.elementwise import transform
from shoal.kernel.algorithms.expression import CppExpression
from shoal.kernel.algorithms.loop import COMPILE_FLAGS
from shoal.kernel.algorithms.memory import allocate
from shoal.kernel.algorithms.policy import Policy, block, par, static

# Kernel -> its expression, its inputs, and bytes that it moves an element (of 8).
KERNELS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "copy": ("a", ("a",), 16),
    "scale": ("s*a", ("c",), 16),
    "add": ("a + b", ("a", "b"), 24),
    "triad": ("a + s*b", ("b", "c"), 24),
}
_OUT = {"copy": "c", "scale": "b", "add": "c", "triad": "a"}
SCALAR = 3.0
POLICY = par.on(block).with_(static())

_SOURCE = r"""
#include <cstdint>
#define LOOP _Pragma("omp parallel for schedule(static)") for (int64_t j = 0; j < n; j++)
typedef double* __restrict D;
extern "C" void stream_copy(int64_t n, D a, D b, D c, double s) { LOOP c[j] = a[j]; }
extern "C" void stream_scale(int64_t n, D a, D b, D c, double s) { LOOP b[j] = s * c[j]; }
extern "C" void stream_add(int64_t n, D a, D b, D c, double s) { LOOP c[j] = a[j] + b[j]; }
extern "C" void stream_triad(int64_t n, D a, D b, D c, double s) { LOOP a[j] = b[j] + s * c[j]; }
"""

Arrays = dict[str, np.ndarray]


def arrays(n: int, policy: Policy = POLICY) -> Arrays:
    """a, b and c of STREAM, on the memory of the threads that use them."""
    made = {name: allocate(n, policy=policy) for name in "abc"}
    for name, value in zip("abc", (1.0, 2.0, 0.5), strict=True):
        transform(policy, made[name], out=made[name], f="v", v=value)
    return made


def own(name: str, held: Arrays, policy: Policy = POLICY) -> Callable[[], Any]:
    """One of the four, by ``transform``."""
    f, inputs, _ = KERNELS[name]
    read, out = [held[x] for x in inputs], held[_OUT[name]]
    constants = {"s": SCALAR} if "s" in f else {}
    text: str | CppExpression = f
    return functools.partial(transform, policy, *read, out=out, f=text, **constants)


def native(name: str, held: Arrays) -> Callable[[], Any]:
    """The same in C, compiled with the same flags.

    Raises:
        BuildError: there is no compiler.
    """
    import ctypes

    import torch  # noqa: F401 - brings the OpenMP runtime that the library shares

    run = getattr(build(_SOURCE, name="kernel-stream", flags=COMPILE_FLAGS), f"stream_{name}")
    run.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_double]
    run.restype = None
    at = (held[x].ctypes.data for x in "abc")
    return functools.partial(run, held["a"].size, *at, SCALAR)


def rates(
    n: int = 1 << 25, *, policy: Policy = POLICY, pairs: int = 15
) -> dict[str, dict[str, float]]:
    """Bytes per second of each kernel, by the algorithms and by C, measured in turns.

    Args:
        n: elements of each of the three arrays; together well beyond the last cache.
        policy: of the algorithms.
        pairs: rounds.

    Returns:
        rates: kernel -> ``algorithms`` and ``openmp_c`` in B/s, and their ``ratio``.
    """
    held = arrays(n, policy)
    rates: dict[str, dict[str, float]] = {}
    for name, (_, _, moved) in KERNELS.items():
        timed = interleave(
            {"algorithms": own(name, held, policy), "openmp_c": native(name, held)}, pairs
        )
        rates[name] = {
            who: moved * n / timed.median(who).value for who in ("algorithms", "openmp_c")
        }
        rates[name]["ratio"] = timed.ratio("openmp_c", "algorithms").value
    return rates
