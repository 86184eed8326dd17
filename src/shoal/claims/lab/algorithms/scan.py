"""Prefix sums in two passes: chunks are reduced, then scanned from where they begin."""

from __future__ import annotations

import functools
from typing import Any

from shoal.core.errors import KernelError
from shoal.kernel.algorithms.elementwise import disjoint
from shoal.kernel.algorithms.expression import CppExpression
from shoal.kernel.algorithms.loop import (
    CATCH,
    LoopLibrary,
    built,
    call,
    check_op,
    names_of,
    operator,
    schedulable,
)
from shoal.kernel.algorithms.memory import TYPES, view
from shoal.kernel.algorithms.policy import Policy


@schedulable
def inclusive_scan(
    policy: Policy,
    a: Any,
    out: Any,
    op: str | CppExpression = "+",
    *,
    init: float | None = None,
    assume_associative: bool = False,
) -> Any:
    """``out[i] = op`` of ``a[0]`` to ``a[i]``; ``out`` may be ``a``.

    Args:
        policy: how.
        a: [N].
        out: [N].
        op: + * min max, or an expression of x and y, in this order.
        init: stands before the first element.
        assume_associative: an expression as ``op`` may be regrouped.
    """
    return _scan("inclusive_scan", policy, a, out, op, init, assume_associative)


@schedulable
def exclusive_scan(
    policy: Policy,
    a: Any,
    out: Any,
    op: str | CppExpression = "+",
    *,
    init: float | None = None,
    assume_associative: bool = False,
) -> Any:
    """``out[i] = op`` of ``init`` and ``a[0]`` to ``a[i - 1]``; ``out[0]`` is ``init``.

    ``init`` is 0 for + and 1 for * where it is not given.
    """
    if init is None:
        init = {"+": 0, "*": 1}.get(op) if isinstance(op, str) else None
        if init is None:
            raise KernelError(
                f"algorithms.exclusive_scan op = {op!r}: the first result is init, which is missing"
            )
    return _scan("exclusive_scan", policy, a, out, op, init, assume_associative)


def _scan(
    name: str,
    policy: Policy,
    a: Any,
    out: Any,
    op: str | CppExpression,
    init: float | None,
    assume_associative: bool,
) -> Any:
    where = f"algorithms.{name}"
    check_op(where, op, policy, assume_associative)
    read, written = view(f"{where} a", a), view(f"{where} out", out)
    given = {} if init is None else {"init": init}
    n, numbers = names_of(where, {"a": read, "out": written}, given)
    same = read.address == written.address and (read.step, read.dtype) == (
        written.step,
        written.dtype,
    )
    if not same:
        disjoint(where, written, read)
    kinds = tuple(isinstance(number, int) for number in numbers.values())
    made = _compiled(where, read.dtype, written.dtype, op, kinds, name == "inclusive_scan")
    call(made, policy, n, (read, written), tuple(numbers.values()), 0, where)
    return out


@functools.lru_cache(maxsize=256)
def _compiled(
    where: str,
    dtype: str,
    out: str,
    op: str | CppExpression,
    init: tuple[bool, ...],
    inclusive: bool,
) -> LoopLibrary:
    kind, written = TYPES[dtype], TYPES[out]
    combine = operator(where, op, "Op", "R", "float" if dtype == "float32" else "double")
    begin = f"{{R(call->{'whole' if init[0] else 'real'}[0]), 1}}" if init else "{}"
    write = f"to[i * to_step] = {written}(carry.value);"
    step = "join(carry, x, Op());"
    step = f"{step} {write}" if inclusive else f"{write} {step}"
    text = f"""
namespace {{
using R = Wide<{kind}>;
{combine}
}}
extern "C" {{
extern const int64_t size;
const int64_t size = sizeof(Part<R>);
const char* reduce(const Call* call, int64_t first, int64_t last, void* result) {{
  try {{
    const {kind}* from = (const {kind}*)call->at[0];
    const int64_t step = call->step[0];
    R sum = R(from[first * step]);
    for (int64_t i = first + 1; i < last; i++) sum = Op()(sum, R(from[i * step]));
    *(Part<R>*)result = {{sum, 1}};
    return nullptr;
  }} {CATCH}
}}
void fold(const Call*, void* into, const void* next) {{
  join(*(Part<R>*)into, *(const Part<R>*)next, Op());
}}
void start(const Call* call, void* result) {{ (void)call; *(Part<R>*)result = {begin}; }}
const char* scan(const Call* call, int64_t first, int64_t last, void* before) {{
  try {{
    const {kind}* from = (const {kind}*)call->at[0];
    {written}* to = ({written}*)call->at[1];
    const int64_t from_step = call->step[0], to_step = call->step[1];
    Part<R> carry = *(const Part<R>*)before;
    for (int64_t i = first; i < last; i++) {{
      const Part<R> x = {{R(from[i * from_step]), 1}};
      {step}
    }}
    return nullptr;
  }} {CATCH}
}}
}}
"""
    return built(text, "algorithm_scan", ("reduce", "fold", "start", "scan"))
