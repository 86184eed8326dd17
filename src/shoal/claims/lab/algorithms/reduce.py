"""reduce and transform_reduce: partials of chunks, combined in the order of the elements."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import KernelError, require
from shoal.kernel.algorithms.expression import CppExpression
from shoal.kernel.algorithms.loop import LoopReduction, check_op, loop, names_of, schedulable
from shoal.kernel.algorithms.memory import view
from shoal.kernel.algorithms.policy import Policy


@schedulable
def transform_reduce(
    policy: Policy,
    *inputs: Any,
    f: str | CppExpression,
    op: str | CppExpression = "+",
    init: float | None = None,
    assume_associative: bool = False,
    **constants: Any,
) -> float | int:
    """``op`` of all ``f(a[i], b[i], c[i])``, in fp64 or 64-bit integers.

    Args:
        policy: how; ``seq`` goes from left to right, ``deterministic()`` over a fixed tree.
        inputs: one to three arrays [N], called a, b and c.
        f: of the elements.
        op: + * min max, or an expression of x and y that is associative.
        init: stands before the first element.
        assume_associative: an expression as ``op`` may be regrouped.
        constants: numbers, by name.

    Raises:
        KernelError: there is no element and no ``init``; or as in ``transform``.
    """
    where = "algorithms.reduce"
    require(
        1 <= len(inputs) <= 3,
        f"{where} inputs",
        len(inputs),
        expected="one to three arrays",
        error=KernelError,
    )
    check_op(where, op, policy, assume_associative)
    read = {name: view(f"{where} {name}", x) for name, x in zip("abc", inputs, strict=False)}
    n, numbers = names_of(where, read, constants)
    result = loop(where, policy, n, read, {}, numbers, {}, {"result": LoopReduction(op, f, init)})[
        0
    ]
    if result is None:
        raise KernelError(f"{where}: nothing to reduce in an empty range; give init")
    return result


@schedulable
def reduce(
    policy: Policy,
    a: Any,
    op: str | CppExpression = "+",
    *,
    init: float | None = None,
    assume_associative: bool = False,
) -> float | int:
    """``op`` of all elements; see :func:`transform_reduce`."""
    value: float | int = transform_reduce(
        policy, a, f="a", op=op, init=init, assume_associative=assume_associative
    )
    return value
