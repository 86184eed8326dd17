"""for_each, transform, copy, fill, and the loop that they are cases of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.errors import KernelError, require
from shoal.kernel.algorithms.expression import CppExpression
from shoal.kernel.algorithms.loop import LoopReduction, check_op, loop, names_of, schedulable
from shoal.kernel.algorithms.memory import ArrayView, overlaps, view
from shoal.kernel.algorithms.policy import Policy

_INPUTS = ("a", "b", "c")


@schedulable
def transform(
    policy: Policy, *inputs: Any, out: Any, f: str | CppExpression, **constants: Any
) -> Any:
    """``out[i] = f(a[i], b[i], c[i])``.

    Args:
        policy: how.
        inputs: one to three arrays [N], called a, b and c in the expression; i is the place.
        out: [N], any type; one of the inputs itself, or memory of its own.
        f: the expression, such as ``a + s*b``.
        constants: numbers, by the names that they have in it.

    Returns:
        out: the same array.

    Raises:
        KernelError: lengths differ, memory overlaps shifted, or the expression is none.
    """
    where = "algorithms.transform"
    require(
        1 <= len(inputs) <= 3,
        f"{where} inputs",
        len(inputs),
        expected="one to three arrays",
        error=KernelError,
    )
    read = {name: view(f"{where} {name}", x) for name, x in zip(_INPUTS, inputs, strict=False)}
    written = {"out": view(f"{where} out", out)}
    n, numbers = names_of(where, {**read, **written}, constants)
    loop(where, policy, n, read, written, numbers, {"out": f}, {})
    return out


@schedulable
def for_each(policy: Policy, a: Any, f: str | CppExpression, **constants: Any) -> Any:
    """``a[i] = f(a[i])`` in place, such as ``max(a, 0)``; i is the place."""
    where = "algorithms.for_each"
    written = {"a": view(f"{where} a", a)}
    n, numbers = names_of(where, written, constants)
    loop(where, policy, n, {}, written, numbers, {"a": f}, {})
    return a


@schedulable
def copy(policy: Policy, a: Any, out: Any) -> Any:
    """``out[i] = a[i]``, converted where types differ."""
    where = "algorithms.copy"
    read, written = {"a": view(f"{where} a", a)}, {"out": view(f"{where} out", out)}
    n, numbers = names_of(where, {**read, **written}, {})
    loop(where, policy, n, read, written, numbers, {"out": "a"}, {})
    return out


@schedulable
def fill(policy: Policy, out: Any, value: float) -> Any:
    """``out[i] = value``."""
    where = "algorithms.fill"
    written = {"out": view(f"{where} out", out)}
    n, numbers = names_of(where, written, {"value": value})
    loop(where, policy, n, {}, written, numbers, {"out": "value"}, {})
    return out


@schedulable
def for_loop(
    policy: Policy,
    n: int | None = None,
    *,
    write: Mapping[str, str | CppExpression] | None = None,
    reduce: Mapping[str, tuple[str | CppExpression, str | CppExpression]] | None = None,
    assume_associative: bool = False,
    **named: Any,
) -> dict[str, float | int]:
    """Any elementwise work over named arrays, and reductions of it, in one pass.

    ::

        for_loop(par, write={"y": "y + s*x"}, reduce={"peak": ("max", "abs(x)")}, x=x, y=y, s=2.0)

    Args:
        policy: how.
        n: elements; only needed where there is no array.
        write: array -> expression of the elements before the loop.
        reduce: name -> (operator, expression); operators are + * min max or an expression of x, y.
        assume_associative: other operators may be regrouped.
        named: arrays and numbers, by the names that they have in the expressions; i is the place.

    Returns:
        results: name of the reduction -> number.
    """
    where = "algorithms.for_loop"
    write, reduce = write or {}, reduce or {}
    arrays = {
        name: view(f"{where} {name}", x)
        for name, x in named.items()
        if isinstance(x, np.ndarray) or hasattr(x, "data_ptr")
    }
    rest = {name: x for name, x in named.items() if name not in arrays}
    length, numbers = names_of(where, arrays, rest)
    for name in write:
        require(
            name in arrays,
            f"{where} write",
            name,
            expected=f"one of the arrays {', '.join(arrays) or '(none given)'}",
            error=KernelError,
        )
    require(
        bool(arrays) or n is not None,
        f"{where} n",
        n,
        expected="the number of elements, as there is no array",
        error=KernelError,
    )
    require(
        n is None or not arrays or n == length,
        f"{where} n",
        n,
        expected=f"{length}, as the arrays have",
        error=KernelError,
    )
    for op, _ in reduce.values():
        check_op(where, op, policy, assume_associative)
    sums = {name: LoopReduction(op, f) for name, (op, f) in reduce.items()}
    read = {name: x for name, x in arrays.items() if name not in write}
    written: dict[str, ArrayView] = {name: arrays[name] for name in write}
    count = n if n is not None else length
    result = loop(where, policy, count, read, written, numbers, write, sums)
    results: dict[str, float | int] = {}
    for name, value in zip(reduce, result, strict=True):
        if value is None:
            raise KernelError(f"{where} {name}: nothing to reduce in an empty range")
        results[name] = value
    return results


def disjoint(where: str, out: ArrayView, other: ArrayView) -> None:
    """Refuse an output that shares memory with an input.

    Raises:
        KernelError: it does.
    """
    if overlaps(out, other) or out.address == other.address:
        raise KernelError(
            f"{where}: out shares memory with the input, which is read again after it is written; "
            "write to another array"
        )
