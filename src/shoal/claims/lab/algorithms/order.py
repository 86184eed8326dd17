"""sort, partition, unique and histogram."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shoal.core.errors import KernelError, require
from shoal.kernel.algorithms.elementwise import disjoint
from shoal.kernel.algorithms.expression import CppExpression, cpp
from shoal.kernel.algorithms.loop import (
    CATCH,
    LoopLibrary,
    LoopReduction,
    built,
    call,
    loop,
    names_of,
    real_type,
    schedulable,
)
from shoal.kernel.algorithms.memory import TYPES, ArrayView, view
from shoal.kernel.algorithms.policy import Policy, inline
from shoal.kernel.native import function

_SORTED = ("float64", "float32", "int64", "int32")


@schedulable
def sort(
    policy: Policy,
    a: Any,
    *,
    key: str | CppExpression | None = None,
    descending: bool = False,
    **constants: Any,
) -> Any:
    """Sort in place. Elements of equal keys keep their order; NaN comes last.

    Args:
        policy: how many threads sort; neither its executor nor its chunks matter here.
        a: [N].
        key: what is compared, an expression of ``a``; the element itself if not given.
        descending: the greatest first.
        constants: numbers, by the names that they have in the key.
    """
    where = "algorithms.sort"
    array = view(f"{where} a", a)
    n, numbers = names_of(where, {"a": array}, constants)
    threads = 1 if policy.executor == inline else _team(policy)
    if key is not None or descending:
        array.array[...] = array.array[_order(policy, array, key, descending, numbers, threads)]
        return a
    kind = array.dtype if array.dtype in _SORTED else "int32"
    work = np.ascontiguousarray(array.array, dtype=kind)
    spare = np.empty_like(work)
    run = function("algorithms_sort", f"sort_{kind}", "ppll")
    run(work.ctypes.data, spare.ctypes.data, n, threads)
    if work is not array.array:
        array.array[...] = work
    return a


def _order(
    policy: Policy,
    array: ArrayView,
    key: str | CppExpression | None,
    descending: bool,
    numbers: dict[str, float | int],
    threads: int,
) -> np.ndarray:
    """Places of the elements, in the order of their keys."""
    where, n = "algorithms.sort", array.n
    text = "a" if key is None else key
    # An integer that fp64 does not hold must stay one: the sum of the keys says what they are.
    term = loop(
        where, policy, min(n, 1), {"a": array}, {}, numbers, {}, {"": LoopReduction("y", text)}
    )
    kind = "int64" if n and isinstance(term[0], int) else "float64"
    keys, place = np.empty(n, dtype=kind), np.empty(n, dtype=np.int64)
    written = {"of_key": view(where, keys)}
    loop(where, policy, n, {"a": array}, written, numbers, {"of_key": text}, {})
    run = function("algorithms_sort", f"order_{kind}", "pplll")
    run(keys.ctypes.data, place.ctypes.data, n, int(descending), threads)
    return place


@schedulable
def partition(policy: Policy, a: Any, out: Any, f: str | CppExpression, **constants: Any) -> int:
    """Elements for which ``f`` is true, then the others, each in their order.

    Args:
        policy: how.
        a: [N].
        out: [N], other memory of the same type.
        f: of ``a`` and i, such as ``a > s``.
        constants: numbers, by name.

    Returns:
        count: of elements for which it is true.
    """
    where = "algorithms.partition"
    return _picked(where, policy, a, out, f, constants, True)


@schedulable
def unique(policy: Policy, a: Any, out: Any) -> int:
    """The first of each run of equal elements; their number."""
    return _picked("algorithms.unique", policy, a, out, None, {}, False)


@schedulable
def histogram(policy: Policy, a: Any, bins: int, low: float, high: float) -> np.ndarray:
    """Elements in each of the equal parts of [low, high], as ``numpy.histogram`` counts them.

    Args:
        policy: how.
        a: [N].
        bins: parts.
        low: where the first begins.
        high: where the last ends, itself included.

    Returns:
        count: int64 [bins].
    """
    where = "algorithms.histogram"
    require(bins >= 1, f"{where} bins", bins, expected="1 or more", error=KernelError)
    require(
        bool(np.isfinite([low, high]).all()) and low < high,
        f"{where} range",
        (low, high),
        expected="finite ends, the lower first",
        error=KernelError,
    )
    array = view(f"{where} a", a)
    edges = np.linspace(low, high, bins + 1)
    counts = np.zeros(bins, dtype=np.int64)
    made = _histogram(array.dtype)
    extra = (edges.ctypes.data, counts.ctypes.data)
    call(made, policy, array.n, (array,), (bins,), 0, where, extra=extra)
    return counts


def _picked(
    where: str,
    policy: Policy,
    a: Any,
    out: Any,
    f: str | CppExpression | None,
    constants: dict[str, Any],
    others: bool,
) -> int:
    read, written = view(f"{where} a", a), view(f"{where} out", out)
    n, numbers = names_of(where, {"a": read, "out": written}, constants)
    require(
        read.dtype == written.dtype,
        f"{where} out",
        written.dtype,
        expected=f"{read.dtype}, as a has",
        error=KernelError,
    )
    disjoint(where, written, read)
    whole = tuple((name, isinstance(number, int)) for name, number in numbers.items())
    made = _picker(where, read.dtype, f, whole, others)
    result = call(made, policy, n, (read, written), tuple(numbers.values()), 1, where)[0]
    return int(result or 0)


@functools.lru_cache(maxsize=256)
def _picker(
    where: str,
    dtype: str,
    f: str | CppExpression | None,
    whole: tuple[tuple[str, bool], ...],
    others: bool,
) -> LoopLibrary:
    kind, real = TYPES[dtype], real_type({dtype})
    if f is None:
        test = "i == 0 || !(a == from[(i - 1) * step])"
    else:
        test = cpp(where, f, frozenset(["a", "i", *(name for name, _ in whole)]), real)
    constants = " ".join(
        f"const {k} {name} = {k}(call->{held}[{index}]); (void){name};"
        for index, (name, integer) in enumerate(whole)
        for k, held in [("int64_t", "whole") if integer else (real, "real")]
    )
    shared = f"""const {kind}* from = (const {kind}*)call->at[0];
    const int64_t step = call->step[0];"""
    text = f"""
namespace {{
inline bool picked(const Call* call, const {kind}* from, int64_t step, int64_t i) {{
  const {kind} a = from[i * step];
  (void)a, (void)call;
  {constants}
  return bool({test});
}}
}}
extern "C" {{
const char* count(const Call* call, int64_t first, int64_t last, void* result) {{
  try {{
    {shared}
    int64_t n = 0;
    for (int64_t i = first; i < last; i++) n += picked(call, from, step, i);
    *(int64_t*)result = n;
    return nullptr;
  }} {CATCH}
}}
const char* place(const Call* call, int64_t first, int64_t last, void* begin) {{
  try {{
    {shared}
    {kind}* to = ({kind}*)call->at[1];
    const int64_t to_step = call->step[1];
    int64_t yes = ((int64_t*)begin)[0], no = ((int64_t*)begin)[1];
    (void)no;
    for (int64_t i = first; i < last; i++) {{
      const {kind} a = from[i * step];
      if (picked(call, from, step, i)) to[yes++ * to_step] = a;
      {"else to[no++ * to_step] = a;" if others else ""}
    }}
    return nullptr;
  }} {CATCH}
}}
}}
"""
    return built(text, "algorithm_pick", ("count", "place"), sized=False)


@functools.lru_cache(maxsize=16)
def _histogram(dtype: str) -> LoopLibrary:
    run = function("algorithms", f"histogram_{dtype}", "p", "l")
    return LoopLibrary(run, (), None, None)


def _team(policy: Policy) -> int:
    import torch

    most = torch.get_num_threads()
    return min(policy.cores, most) if policy.cores else most
