"""What a type means and how it is packed, explained from its text.

The text is an expression of the constructors of :mod:`shoal.kernel.strided.datatype`, with
the names of primitive types, or a slice of an array::

    vector(13, 100, 128, float32)
    hvector(47, 1, 131072, vector(13, 100, 128, byte))
    subarray([256, 512, 1024], [47, 13, 100], [0, 0, 0], float32)
    float32[256, 256, 256][:, 0, ::2]
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from shoal.core.errors import KernelError, require, suggestion
from shoal.kernel.strided import datatype as types
from shoal.kernel.strided.canonical import (
    Layout,
    RewriteStep,
    StridedBlock,
    canonical,
    rewritten,
    word_bytes,
)
from shoal.kernel.strided.datatype import BYTES_OF, Datatype, from_strides, named

_CONSTRUCTORS: dict[str, Callable[..., Datatype]] = {
    name: getattr(types, name)
    for name in (
        "named",
        "contiguous",
        "vector",
        "hvector",
        "subarray",
        "resized",
        "indexed",
        "hindexed",
        "struct",
    )
}


def parse(text: str) -> Datatype:
    """The type that an expression describes.

    Raises:
        KernelError: it is no such expression; says what is wrong where.
    """
    require(
        len(text) <= 10_000,
        "strided type",
        f"{len(text)} characters",
        expected="at most 10,000",
        error=KernelError,
    )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise KernelError(
            f"strided type {text!r}: not an expression ({cause}); write for instance "
            "vector(13, 100, 128, float32) or float32[256, 256][:, 0]"
        ) from cause
    result = _value(tree)
    if not isinstance(result, Datatype):
        raise KernelError(
            f"strided type {text!r}: expected a type, such as vector(13, 100, 128, float32)"
        )
    return result


def explain(text: str, *, count: int = 1) -> str:
    """What the type is, rule by rule, and what packs it here, as lines of text.

    Raises:
        KernelError: the text is no type.
    """
    datatype = parse(text)
    layout, steps = rewritten(datatype, count)
    rows = [
        ("type", text.strip() + (f" x {count}" if count != 1 else "")),
        ("bytes", f"{layout.size:,} over an extent of {layout.extent:,}"),
        *((step.rule, _spelled(step)) for step in steps),
        ("canonical", _canonical(layout)),
    ]
    free = canonical(datatype, count, order_free=True)
    if free != layout:
        rows.append(("in any order", _canonical(free)))
    rows += [
        ("blocks", f"{layout.runs:,} in {layout.touched:,} bytes of cache lines"),
        (
            "received",
            "no: contains a byte twice" if layout.overlaps else "yes: contains no byte twice",
        ),
    ]
    if layout.size:
        rows += _kernels(layout)
    return "\n".join(f"{name:<14}{told}" for name, told in rows)


def _kernels(layout: Layout) -> list[tuple[str, str]]:
    from shoal.kernel.dispatch import candidates
    from shoal.kernel.strided.calls import Pack, Unpack

    rows = []
    if isinstance(layout, StridedBlock):
        rows.append(("word", f"{word_bytes(layout)} bytes divide all offsets and sizes"))
    for call in (Pack(layout), Unpack(layout)):
        if call.op == "unpack" and layout.overlaps:
            continue
        text = ", ".join(f"{name} {1e6 * s:.3g} us" for name, s in candidates(call))
        rows.append((call.op, f"predicted here: {text}"))
    return rows


def _spelled(step: RewriteStep) -> str:
    streams = "".join(f"{count:,} x {stride:,}, " for count, stride in step.streams)
    return f"{streams}{step.dense:,} bytes"


def _canonical(layout: Layout) -> str:
    if not isinstance(layout, StridedBlock):
        return f"a list of {layout.runs:,} irregular blocks"
    counts = " x ".join(f"{n:,}" for n in layout.counts)
    strides = ", ".join(f"{s:,}" for s in layout.strides)
    return f"from {layout.start:,}: {counts} at strides {strides} ({len(layout.counts)}-D)"


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return named(node.id)
    if isinstance(node, ast.Constant) and type(node.value) in (int, str):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _called(node, node.func.id)
    if isinstance(node, ast.Subscript):
        return _sliced(node)
    raise _wrong(node, "a constructor, a primitive type, a whole number or a list")


def _called(node: ast.Call, name: str) -> Datatype:
    if name not in _CONSTRUCTORS:
        raise _wrong(node, f"one of {', '.join(_CONSTRUCTORS)}" + suggestion(name, _CONSTRUCTORS))
    make = _CONSTRUCTORS[name]
    signature = inspect.signature(make)
    arguments = [_value(item) for item in node.args]
    options = {item.arg: _value(item.value) for item in node.keywords if item.arg}
    try:
        bound = signature.bind(*arguments, **options)
    except TypeError as cause:
        wanted = ", ".join(signature.parameters)
        raise _wrong(node, f"{name}({wanted}): {cause}") from cause
    for key, value in bound.arguments.items():
        kind = str(signature.parameters[key].annotation)
        good = {
            "int": isinstance(value, int),
            "Datatype": isinstance(value, Datatype),
            "Sequence[int]": _all(value, int),
            "Sequence[Datatype]": _all(value, Datatype),
            "str": isinstance(value, str),
            "str | int": isinstance(value, str | int),
        }[kind]
        if not good:
            words = {"int": "a whole number", "Datatype": "a type", "str": "a text"}
            raise _wrong(node, f"{key} to be {words.get(kind, f'a {kind}')}")
    return make(*bound.args, **bound.kwargs)


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _whole(node: ast.expr) -> int:
    result = _value(node)
    if not isinstance(result, int):
        raise _wrong(node, "a whole number")
    return result


def _sliced(node: ast.Subscript) -> Datatype:
    """``float32[8, 8][:, 2]``."""
    inner = node.value
    if isinstance(inner, ast.Name):
        inner, index = node, None
    else:
        index = node.slice
    if not (isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name)):
        raise _wrong(node, "an array such as float32[8, 8], and at most one index behind it")
    require(
        inner.value.id in BYTES_OF,
        "strided type",
        inner.value.id,
        expected=f"one of {', '.join(BYTES_OF)}",
        error=KernelError,
    )
    item = BYTES_OF[inner.value.id]
    shape = [_whole(size) for size in _parts(inner.slice)]
    if any(size < 0 for size in shape):
        raise _wrong(inner, "sizes of 0 or more")
    strides, stride = [0] * len(shape), item
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim], stride = stride, stride * shape[dim]
    indices = [] if index is None else _parts(index)
    if len(indices) > len(shape):
        raise _wrong(node, f"at most {len(shape)} indices")
    at, counts, steps = 0, [], []
    for dim, size in enumerate(shape):
        one = indices[dim] if dim < len(indices) else ast.Slice(None, None, None)
        if isinstance(one, ast.Slice):
            ends = [
                None if end is None else _whole(end) for end in (one.lower, one.upper, one.step)
            ]
            if ends[2] == 0:
                raise _wrong(node, "a step other than 0")
            chosen = range(*slice(*ends).indices(size))
            at += chosen.start * strides[dim] if chosen else 0
            counts.append(len(chosen))
            steps.append(chosen.step * strides[dim])
        else:
            place = _whole(one)
            if not -size <= place < size:
                raise _wrong(node, f"index {place} to lie in dimension {dim} of size {size}")
            at += place % size * strides[dim]
    view = from_strides(counts, steps, item)
    return types.struct([1], [at], [view])


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _wrong(node: ast.AST, expected: str) -> KernelError:
    text = ast.unparse(node)
    return KernelError(f"strided type: {text[:200]!r}: expected {expected}")
