"""Which placements an operation can take, and which one it then makes: one table.

A *signature* says, for one axis of a mesh: with these inputs every rank of the axis can do
the operation on what it holds, and this is what they have then. Axes are independent of
each other, so the signatures on a mesh are all combinations of one a mesh axis, but for
dimensions that must divide evenly and for sums beside maxima.

What is partial passes linear operations alone: ``relu`` of a sum is not the sum of
``relu``. A maximum passes what never decreases.

Source: Yuan et al., OneFlow, 2021, table 1 (matmul); the other rows follow from the
mathematics of each operation, and tests carry out every one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.core.errors import PlanError, nearest, require
from shoal.ir.placement import Axis, Broadcast, Mesh, Partial, Placement, Split, show_placement

Shape: TypeAlias = tuple[int, ...]
Attributes: TypeAlias = Mapping[str, Any]

B = Broadcast()
SUM = Partial("sum")
MAX = Partial("max")

# Element by element: f(a + b) = f(a) + f(b).
LINEAR = ("neg", "scale")
# Never decreasing, so that f(max(a, b)) = max(f(a), f(b)).
MONOTONE = ("relu", "sigmoid", "tanh", "exp", "add_scalar")
# sqrt and log never decrease, but have no value at the -inf that stands for no share.
NONLINEAR = ("gelu", "silu", "square", "sqrt", "log", "rsqrt", "reciprocal")


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and output on one axis of the mesh.

    Args:
        inputs: one entry for each input.
        output: what comes out.
        even: (input, dimension) that the ranks must divide evenly; -1 is the output.
    """

    inputs: tuple[Axis, ...]
    output: Axis
    even: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.inputs))}) -> {self.output}"


@dataclass(frozen=True, slots=True)
class MeshSignature:
    """Inputs and output on all axes of a mesh."""

    inputs: tuple[Placement, ...]
    output: Placement

    def __str__(self) -> str:
        given = "; ".join(show_placement(placement) for placement in self.inputs)
        return f"({given}) -> {show_placement(self.output)}"


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    Args:
        shape: shape of the output.
        signatures: what is legal on one axis of a mesh, whatever its size.
        flops: floating-point operations, from shapes of the inputs and of the output.
        inputs: numbers of inputs that it can have.
    """

    shape: Callable[[Sequence[Shape], Attributes], Shape]
    signatures: Callable[[Sequence[Shape], Attributes], Iterator[Signature]]
    flops: Callable[[Sequence[Shape], Shape], float]
    inputs: tuple[int, ...] = (1,)


def _size(shape: Shape) -> float:
    return float(math.prod(shape))


def _each_element(_: Sequence[Shape], out: Shape) -> float:
    return _size(out)


def _aligned(shapes: Sequence[Shape], out: Shape, keep: int = 0) -> Iterator[Signature]:
    """Splits of an output dimension, inputs broadcast as numpy does, but the last ``keep``."""
    for dim in range(len(out) - keep):
        yield Signature(tuple(_input(shape, out, dim) for shape in shapes), Split(dim))


def _input(shape: Shape, out: Shape, dim: int) -> Axis:
    """How an input of ``shape`` lies where dimension ``dim`` of the result is split."""
    own = dim - (len(out) - len(shape))
    return B if own < 0 or (shape[own] == 1 and out[dim] != 1) else Split(own)


def _same(count: int, axis: Axis = B) -> Signature:
    return Signature((axis,) * count, axis)


def _broadcast_shape(shapes: Sequence[Shape], where: str) -> Shape:
    dims = max(len(shape) for shape in shapes)
    out = []
    for sizes in zip(*((1,) * (dims - len(s)) + tuple(s) for s in shapes), strict=True):
        wide = {size for size in sizes if size != 1} or {1}
        require(
            len(wide) == 1,
            where,
            [list(shape) for shape in shapes],
            expected="shapes that broadcast to one",
            error=PlanError,
        )
        out.append(wide.pop())
    return tuple(out)


def _dim(attributes: Attributes, shape: Shape, name: str = "dim") -> int:
    dim = int(attributes[name])
    require(
        -len(shape) <= dim < len(shape),
        name,
        dim,
        expected=f"a dimension of shape {list(shape)}",
        error=PlanError,
    )
    return dim % len(shape)


# Element by element.


def _unary(partial: Sequence[Axis]) -> Operation:
    def signatures(shapes: Sequence[Shape], _: Attributes) -> Iterator[Signature]:
        yield from _aligned(shapes, shapes[0])
        yield _same(1)
        for axis in partial:
            yield _same(1, axis)

    return Operation(lambda shapes, _: tuple(shapes[0]), signatures, _each_element)


def _scale(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    yield from _aligned(shapes, shapes[0])
    yield _same(1)
    yield _same(1, SUM)
    if attributes["factor"] > 0:
        yield _same(1, MAX)


def _elementwise(partial: Sequence[Signature]) -> Operation:
    def signatures(shapes: Sequence[Shape], _: Attributes) -> Iterator[Signature]:
        yield from _aligned(shapes, _broadcast_shape(shapes, "shapes"))
        yield _same(2)
        yield from partial

    return Operation(
        lambda shapes, _: _broadcast_shape(shapes, "shapes"), signatures, _each_element, (2,)
    )


# Reductions over one dimension.


def _reduced_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    shape = tuple(shapes[0])
    dim = _dim(attributes, shape)
    kept = (1,) if attributes.get("keepdim", False) else ()
    return shape[:dim] + kept + shape[dim + 1 :]


def _reduction(partial: Partial) -> Operation:
    def signatures(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
        dim = _dim(attributes, shapes[0])
        gone = 0 if attributes.get("keepdim", False) else 1
        for other in range(len(shapes[0])):
            if other == dim:
                yield Signature((Split(other),), partial)
            else:
                yield Signature((Split(other),), Split(other - (gone if other > dim else 0)))
        yield _same(1)
        yield _same(1, partial)

    return Operation(_reduced_shape, signatures, lambda shapes, _: _size(shapes[0]))


def _softmax(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    dim = _dim(attributes, shapes[0])
    yield from (s for s in _aligned(shapes, shapes[0]) if s.output != Split(dim))
    yield _same(1)


def _norm(shapes: Sequence[Shape], _: Attributes) -> Iterator[Signature]:
    yield from _aligned(shapes, shapes[0], keep=1)
    yield _same(len(shapes))


# Products.


def _matmul_shape(shapes: Sequence[Shape], _: Attributes) -> Shape:
    a, b = shapes
    require(
        len(a) >= 2 and len(b) >= 2 and a[-1] == b[-2],
        "matmul",
        [list(a), list(b)],
        expected="[..., M, K] and [..., K, N]",
        error=PlanError,
    )
    return (*_broadcast_shape([a[:-2], b[:-2]], "matmul"), a[-2], b[-1])


def _matmul(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    a, b = shapes
    out = _matmul_shape(shapes, attributes)
    for dim in range(len(out) - 2):
        stacks = [_input(s[:-2], out[:-2], dim) for s in (a, b)]
        yield Signature(tuple(stacks), Split(dim))
    yield Signature((Split(len(a) - 2), B), Split(len(out) - 2))
    yield Signature((B, Split(len(b) - 1)), Split(len(out) - 1))
    yield Signature((Split(len(a) - 1), Split(len(b) - 2)), SUM)
    yield Signature((SUM, B), SUM)
    yield Signature((B, SUM), SUM)
    yield _same(2)


def _linear_shape(shapes: Sequence[Shape], _: Attributes) -> Shape:
    x, w = shapes[:2]
    require(
        len(w) == 2 and len(x) >= 1 and x[-1] == w[1] and all(s == w[:1] for s in shapes[2:]),
        "linear",
        [list(shape) for shape in shapes],
        expected="[..., K], [N, K] and, where there is a bias, [N]",
        error=PlanError,
    )
    return (*x[:-1], w[0])


def _linear(shapes: Sequence[Shape], _: Attributes) -> Iterator[Signature]:
    dims, bias = len(shapes[0]), len(shapes) - 2
    for dim in range(dims - 1):
        yield Signature((Split(dim), *(B,) * (1 + bias)), Split(dim))
    yield Signature((B, *(Split(0),) * (1 + bias)), Split(dims - 1))
    # A bias is added once: where the products are shares of a sum, it is one as well.
    yield Signature((Split(dims - 1), Split(1), *(SUM,) * bias), SUM)
    yield Signature((SUM, B, *(SUM,) * bias), SUM)
    yield Signature((B, SUM, *(SUM,) * bias), SUM)
    yield _same(2 + bias)


def _product_flops(shapes: Sequence[Shape], out: Shape) -> float:
    return 2.0 * _size(out) * shapes[0][-1]


def _embedding(shapes: Sequence[Shape], _: Attributes) -> Iterator[Signature]:
    dims = len(shapes[0])
    for dim in range(dims):
        yield Signature((Split(dim), B), Split(dim))
    yield Signature((B, Split(1)), Split(dims))
    # Rows of the vocabulary: a rank has the rows of its own tokens and zeros for others.
    yield Signature((B, Split(0)), SUM)
    yield Signature((B, SUM), SUM)
    yield _same(2)


def _attention_shape(shapes: Sequence[Shape], _: Attributes) -> Shape:
    q, k, v = shapes
    good = (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and q[1] % k[1] == 0
        and q[3] == k[3]
        and k[2] == v[2]
    )
    require(
        good,
        "attention",
        [list(shape) for shape in shapes],
        expected="q [B, H, T, d], k [B, K, S, d] and v [B, K, S, e] with H a multiple of K",
        error=PlanError,
    )
    return (*q[:3], v[3])


def _attention(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    grouped = shapes[0][1] != shapes[1][1]
    # A rank's query heads must be those of its key heads.
    even = ((0, 1), (1, 1)) if grouped else ()
    yield Signature((Split(0),) * 3, Split(0))
    yield Signature((Split(1),) * 3, Split(1), even)
    if not attributes.get("causal", False):
        yield Signature((Split(2), B, B), Split(2))
    # The result is linear in the values alone.
    yield Signature((B, B, Split(3)), Split(3))
    yield Signature((B, B, SUM), SUM)
    yield _same(3)


def _attention_flops(shapes: Sequence[Shape], out: Shape) -> float:
    q, k, _ = shapes
    return 2.0 * _size(q) * k[2] + 2.0 * _size(out) * k[2]


# Shapes.


def _permutation(shapes: Sequence[Shape], attributes: Attributes) -> tuple[int, ...]:
    order = tuple(int(dim) % max(1, len(shapes[0])) for dim in attributes["order"])
    require(
        sorted(order) == list(range(len(shapes[0]))),
        "permute.order",
        list(order),
        expected=f"every dimension of shape {list(shapes[0])} once",
        error=PlanError,
    )
    return order


def _permute(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    for new, old in enumerate(_permutation(shapes, attributes)):
        yield Signature((Split(old),), Split(new))
    yield from (_same(1, axis) for axis in (B, SUM, MAX))


def _reshape_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    new = tuple(int(size) for size in attributes["shape"])
    require(
        math.prod(new) == math.prod(shapes[0]),
        "reshape.shape",
        list(new),
        expected=f"as many elements as {list(shapes[0])} has",
        error=PlanError,
    )
    return new


def _reshape(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    old, new = tuple(shapes[0]), _reshape_shape(shapes, attributes)
    for olds, news in _groups(old, new):
        if len(olds) == len(news) == 1:
            yield Signature((Split(olds[0]),), Split(news[0]))
        elif olds and news:
            # Rows of the first dimension stay together; pieces must begin where rows begin.
            even = ((0, olds[0]), (-1, news[0]))
            yield Signature((Split(olds[0]),), Split(news[0]), even)
    yield from (_same(1, axis) for axis in (B, SUM, MAX))


def _groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions that hold the same elements; those of size 1 are in no run."""
    olds = [dim for dim, size in enumerate(old) if size != 1]
    news = [dim for dim, size in enumerate(new) if size != 1]
    while olds and news:
        left, right = [olds.pop(0)], [news.pop(0)]
        a, b = old[left[0]], new[right[0]]
        while a != b:
            if a < b:
                left.append(olds.pop(0))
                a *= old[left[-1]]
            else:
                right.append(news.pop(0))
                b *= new[right[-1]]
        yield left, right


def _narrow_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    shape = list(shapes[0])
    dim = _dim(attributes, shapes[0])
    start, length = int(attributes["start"]), int(attributes["length"])
    require(
        start >= 0 and length >= 0 and start + length <= shape[dim],
        "narrow",
        [start, length],
        expected=f"start and length within dimension {dim} of shape {shape}",
        error=PlanError,
    )
    shape[dim] = length
    return tuple(shape)


def _narrow(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    dim = _dim(attributes, shapes[0])
    yield from (s for s in _aligned(shapes, shapes[0]) if s.output != Split(dim))
    yield from (_same(1, axis) for axis in (B, SUM, MAX))


def _cat_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    dim = _dim(attributes, shapes[0])
    rests = {tuple(shape[:dim]) + tuple(shape[dim + 1 :]) for shape in shapes}
    require(
        len(rests) == 1,
        "cat",
        [list(shape) for shape in shapes],
        expected=f"shapes that differ in dimension {dim} alone",
        error=PlanError,
    )
    first = tuple(shapes[0])
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def _cat(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Signature]:
    dim, count = _dim(attributes, shapes[0]), len(shapes)
    for other in range(len(shapes[0])):
        if other != dim:
            yield _same(count, Split(other))
    yield from (_same(count, axis) for axis in (B, SUM, MAX))


def _first(shapes: Sequence[Shape], _: Attributes) -> Shape:
    return tuple(shapes[0])


def _moved(_: Sequence[Shape], __: Shape) -> float:
    return 0.0


_BILINEAR = (Signature((SUM, B), SUM), Signature((B, SUM), SUM))

OPERATIONS: dict[str, Operation] = {
    **{name: _unary((SUM,)) for name in LINEAR if name != "scale"},
    "scale": Operation(_first, _scale, _each_element),
    **{name: _unary((MAX,)) for name in MONOTONE},
    **{name: _unary(()) for name in NONLINEAR},
    "add": _elementwise(
        (_same(2, SUM), Signature((MAX, B), MAX), Signature((B, MAX), MAX)),
    ),
    "sub": _elementwise((_same(2, SUM), Signature((MAX, B), MAX))),
    "mul": _elementwise(_BILINEAR),
    "div": _elementwise((Signature((SUM, B), SUM),)),
    "maximum": _elementwise(
        (_same(2, MAX), Signature((MAX, B), MAX), Signature((B, MAX), MAX)),
    ),
    "sum": _reduction(SUM),
    "mean": _reduction(SUM),
    "amax": _reduction(MAX),
    "softmax": Operation(_first, _softmax, lambda _, out: 5 * _size(out)),
    "layer_norm": Operation(_first, _norm, lambda _, out: 8 * _size(out), (1, 2, 3)),
    "rms_norm": Operation(_first, _norm, lambda _, out: 5 * _size(out), (1, 2)),
    "matmul": Operation(_matmul_shape, _matmul, _product_flops, (2,)),
    "linear": Operation(_linear_shape, _linear, _product_flops, (2, 3)),
    "embedding": Operation(
        lambda shapes, _: (*shapes[0], shapes[1][1]), _embedding, _each_element, (2,)
    ),
    "attention": Operation(_attention_shape, _attention, _attention_flops, (3,)),
    "permute": Operation(
        lambda shapes, attributes: tuple(
            shapes[0][dim] for dim in _permutation(shapes, attributes)
        ),
        _permute,
        _moved,
    ),
    "reshape": Operation(_reshape_shape, _reshape, _moved),
    "narrow": Operation(_narrow_shape, _narrow, _moved),
    "cat": Operation(_cat_shape, _cat, _moved, tuple(range(1, 65))),
}


def operation(kind: str) -> Operation:
    """The row of an operation.

    Raises:
        PlanError: the table has none; names those that it has.
    """
    require(
        kind in OPERATIONS,
        "operation",
        kind,
        expected=f"one of {', '.join(sorted(OPERATIONS))}",
        hint=nearest(kind, OPERATIONS),
        error=PlanError,
    )
    return OPERATIONS[kind]


def result_shape(kind: str, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of what the operation makes.

    Raises:
        PlanError: no such operation, or it does not take inputs of these shapes.
    """
    row = operation(kind)
    require(
        len(shapes) in row.inputs,
        f"{kind}: inputs",
        len(shapes),
        expected=" or ".join(map(str, row.inputs[:3])),
        error=PlanError,
    )
    return row.shape(shapes, attributes)


def legal(
    kind: str, shapes: Sequence[Shape], attributes: Attributes, mesh: Mesh
) -> tuple[MeshSignature, ...]:
    """All signatures of an operation on a mesh.

    Raises:
        PlanError: no such operation, or it does not take inputs of these shapes.
    """
    out = result_shape(kind, shapes, attributes)
    single = tuple(dict.fromkeys(operation(kind).signatures(shapes, attributes)))
    everything = [*shapes, out]
    result: dict[MeshSignature, None] = {}
    for combined in itertools.product(single, repeat=len(mesh)):
        inputs = tuple(
            tuple(signature.inputs[i] for signature in combined) for i in range(len(shapes))
        )
        made = MeshSignature(inputs, tuple(signature.output for signature in combined))
        if _one_reduction((*inputs, made.output)) and _even(combined, made, everything, mesh):
            result[made] = None
    return tuple(result)


def _one_reduction(placements: Sequence[Placement]) -> bool:
    """Whether no placement has sums beside maxima."""
    return all(not (SUM in placement and MAX in placement) for placement in placements)


def _even(
    combined: Sequence[Signature], made: MeshSignature, shapes: Sequence[Shape], mesh: Mesh
) -> bool:
    """Whether what must divide evenly does, over all axes that split it."""
    for operand, dim in {pair for signature in combined for pair in signature.even}:
        placement = made.output if operand == -1 else made.inputs[operand]
        parts = math.prod(
            size for axis, size in zip(placement, mesh, strict=True) if axis == Split(dim)
        )
        if shapes[operand][dim] % parts:
            return False
    return True
