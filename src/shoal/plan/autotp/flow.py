"""How a split travels: what becomes of a dimension that is shared by ranks, operator by operator.

A split dimension consists of segments, and every rank holds its part of each: one segment where
it is cut into consecutive parts, three where queries, keys and values were fused. An operator
passes a split on, changes its place, or cannot keep it.

Source: Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021
(propagation of shardings).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.plan.autotp.graph import Graph, GraphNode, Ref, refs


@dataclass(frozen=True)
class SplitDimension:
    """A dimension that ranks share.

    Args:
        dim: its number from the front.
        segments: sizes of the pieces that each are cut into consecutive parts.
        origin: the product that the split comes from.
    """

    dim: int
    segments: tuple[int, ...]
    origin: str

    def at(self, dim: int, segments: tuple[int, ...] | None = None) -> SplitDimension:
        """The same split elsewhere."""
        return SplitDimension(dim, self.segments if segments is None else segments, self.origin)


class Stop(Exception):  # noqa: N818 - it steers the search and is no error
    """A split cannot go on.

    Args:
        reason: for people.
        origin: the product that it came from.
        segments: with which it might go on, if there are any.
        needs: a value that must be split in the same way first.
        dim: in which dimension of that value.
        heads: a number of heads that ranks cannot share, unless other segments help.
    """

    def __init__(
        self,
        reason: str,
        origin: str,
        *,
        segments: tuple[int, ...] | None = None,
        needs: str | None = None,
        dim: int = 0,
        heads: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.origin, self.segments = reason, origin, segments
        self.needs, self.dim, self.heads = needs, dim, heads


States = dict[str, SplitDimension | tuple[SplitDimension, ...]]
_Rule = Callable[[Graph, GraphNode, States, int], "SplitDimension | tuple[SplitDimension, ...]"]

POINTWISE = frozenset(
    {
        *("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "neg", "abs"),
        *("exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "tanh", "sigmoid"),
        *("relu", "relu_", "gelu", "silu", "silu_", "mish", "elu", "leaky_relu", "softplus"),
        *("hardswish", "erf", "square", "dropout", "to", "_to_copy", "contiguous", "clone"),
        *("alias", "detach", "detach_", "type_as", "where", "masked_fill", "maximum", "minimum"),
        *("max", "min", "clamp", "clamp_min", "clamp_max", "eq", "ne", "lt", "le", "gt", "ge"),
        *("logical_not", "float", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("nan_to_num", "feature_dropout"),
    }
)
"""Operators that work element by element, with broadcasting."""


def travel(
    graph: Graph, node: GraphNode, states: States, tp: int
) -> SplitDimension | tuple[SplitDimension, ...]:
    """The split of a call's result, of which an argument is split.

    Raises:
        Stop: the operator cannot keep the split.
    """
    rule = _RULES.get(node.op)
    if node.op in POINTWISE:
        return joined(graph, node, states, [*node.args, *dict(node.kwargs).values()])
    if rule is None:
        raise Stop(f"{node.op} is not known to keep a split", _origin(node, states))
    return rule(graph, node, states, tp)


def _origin(node: GraphNode, states: States) -> str:
    for name in node.uses:
        value = states.get(name)
        if value is not None:
            return (value if isinstance(value, SplitDimension) else value[0]).origin
    raise AssertionError("a call without a split argument")


def _of(value: Any, states: States) -> SplitDimension | None:
    result = states.get(value.name) if isinstance(value, Ref) else None
    return result if isinstance(result, SplitDimension) else None


def _first(node: GraphNode, states: States) -> SplitDimension:
    """The split of the first argument, which is the only one that may be split."""
    result = _of(node.args[0], states)
    others = [name for name in node.uses[1:] if name in states]
    if result is None or others:
        raise Stop(f"{node.op} has a split operand other than its first", _origin(node, states))
    return result


def joined(
    graph: Graph, node: GraphNode, states: States, operands: Sequence[Any], upto: int | None = None
) -> SplitDimension:
    """The split of operands that are broadcast against each other.

    Args:
        graph: the trace.
        node: the call.
        states: splits.
        operands: of the call.
        upto: number of dimensions from the back that are not broadcast.
    """
    skip = upto or 0
    refs_ = [value for value in operands if isinstance(value, Ref)]
    rank = max(len(graph.shape(value)) for value in refs_)
    split_dimension: SplitDimension | None = None
    for value in refs_:
        state = _of(value, states)
        if state is None:
            continue
        here = state.at(state.dim + rank - len(graph.shape(value)))
        if split_dimension is not None and (split_dimension.dim, split_dimension.segments) != (
            here.dim,
            here.segments,
        ):
            raise Stop(
                f"{node.op} joins values that are split differently",
                here.origin,
                segments=split_dimension.segments if split_dimension.dim == here.dim else None,
            )
        split_dimension = here
    assert split_dimension is not None
    if split_dimension.dim >= rank - skip:
        raise Stop(f"{node.op} works along the split dimension", split_dimension.origin)
    for value in refs_:
        shape = graph.shape(value)
        place = split_dimension.dim - (rank - len(shape))
        if _of(value, states) is None and place >= 0 and shape[place] > 1:
            raise Stop(
                f"{node.op} joins a split value with a whole one",
                split_dimension.origin,
                needs=value.name,
                dim=place,
            )
    return split_dimension


def _dim(value: int, rank: int) -> int:
    return value + rank if value < 0 else value


def _view(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    before, after = graph.shape(node.args[0]), node.shape or ()
    i = j = 0
    while i < len(before):
        # Dimensions that hold the same elements, before and after.
        left, right = [i], [j] if j < len(after) else []
        size_l, size_r = before[i], after[j] if j < len(after) else 1
        while size_l != size_r:
            if size_l < size_r:
                i += 1
                left.append(i)
                size_l *= before[i]
            else:
                j += 1
                right.append(j)
                size_r *= after[j]
        if state.dim in left:
            return _regroup(state, left, right, before, after, tp)
        i, j = i + 1, j + 1
    raise AssertionError("a split dimension is one of the tensor's")


def _regroup(
    state: SplitDimension,
    left: list[int],
    right: list[int],
    before: tuple[int, ...],
    after: tuple[int, ...],
    tp: int,
) -> SplitDimension:
    wide_l = [d for d in left if before[d] > 1]
    wide_r = [d for d in right if after[d] > 1]
    if [before[d] for d in wide_l] == [after[d] for d in wide_r]:
        return state.at(wide_r[wide_l.index(state.dim)])
    count = len(state.segments)
    size = before[state.dim]
    if wide_l[0] == state.dim and count == 1:
        # Consecutive parts of the first dimension are consecutive parts of what it becomes.
        to = wide_r[0]
        if after[to] % tp == 0:
            return state.at(to, (_size(before, wide_l),) if len(wide_r) == 1 else (after[to],))
        rest = wide_r[1] if len(wide_r) > 1 else None
        if rest is not None and after[to] <= 4 and after[rest] % tp == 0 and len(wide_l) == 1:
            raise Stop(
                f"{size} features are {after[to]} heads, which {tp} ranks cannot share",
                state.origin,
                segments=(size // after[to],) * after[to],
                heads=True,
            )
        raise Stop(
            f"{size} features are {after[to]} heads, which {tp} ranks cannot share",
            state.origin,
            heads=True,
        )
    equal = len(set(state.segments)) == 1
    if len(wide_l) == 1 and count > 1 and equal and after[wide_r[0]] == count:
        # [3 x D] is [3, H, ...]: the heads of each segment are shared.
        to = wide_r[1]
        if after[to] % tp == 0:
            return state.at(to, (after[to],))
    if len(wide_l) > 1 and wide_l[1] == state.dim and count == 1 and len(wide_r) == 1:
        # [3, H, ...] is [3 x D]: a segment for each.
        each = _size(before, wide_l[1:])
        return state.at(wide_r[0], (each,) * before[wide_l[0]])
    raise Stop("a view tears the split dimension apart", state.origin)


def _size(shape: tuple[int, ...], dims: Sequence[int]) -> int:
    """Elements of some dimensions together."""
    out = 1
    for d in dims:
        out *= shape[d]
    return out


def _flatten(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    return _view(graph, node, states, tp)


def _transpose(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    rank = len(graph.shape(node.args[0]))
    a, b = (_dim(int(node.args[k]), rank) for k in (1, 2))
    return state.at({a: b, b: a}.get(state.dim, state.dim))


def _turned(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    return state.at(len(graph.shape(node.args[0])) - 1 - state.dim)


def _permute(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    rank = len(graph.shape(node.args[0]))
    order = [_dim(int(d), rank) for d in node.args[1]]
    return state.at(order.index(state.dim))


def _unsqueeze(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    at = _dim(int(node.args[1]), len(graph.shape(node.args[0])) + 1)
    return state.at(state.dim + (at <= state.dim))


def _squeeze(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    before = graph.shape(node.args[0])
    if len(node.args) > 1:
        given = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        gone = [_dim(int(d), len(before)) for d in given]
    else:
        gone = list(range(len(before)))
    gone = [d for d in gone if before[d] == 1]
    return state.at(state.dim - sum(d < state.dim for d in gone))


def _expand(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    return state.at(state.dim + len(node.shape or ()) - len(graph.shape(node.args[0])))


def _repeat(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _expand(graph, node, states, tp)
    if node.args[1][state.dim] != 1:
        raise Stop("repeat along the split dimension", state.origin)
    return state


def _repeat_interleave(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    dim = node.arg(2, "dim")
    if dim is None:
        raise Stop("repeat_interleave of all elements", state.origin)
    if _dim(int(dim), len(graph.shape(node.args[0]))) != state.dim:
        return state
    return state.at(state.dim, tuple(size * int(node.args[1]) for size in state.segments))


def _select(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    at = _dim(int(node.args[1]), len(graph.shape(node.args[0])))
    if at == state.dim:
        raise Stop("select along the split dimension", state.origin)
    return state.at(state.dim - (at < state.dim))


def _unbind(graph: Graph, node: GraphNode, states: States, tp: int) -> tuple[SplitDimension, ...]:
    state = _first(node, states)
    shape = graph.shape(node.args[0])
    at = _dim(int(node.arg(1, "dim", 0)), len(shape))
    if at == state.dim:
        raise Stop("unbind along the split dimension", state.origin)
    return (state.at(state.dim - (at < state.dim)),) * shape[at]


def _slice(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    shape = graph.shape(node.args[0])
    at = _dim(int(node.arg(1, "dim", 0)), len(shape))
    if at != state.dim or node.shape == shape:
        return state
    size = shape[at]
    begin = min(_dim(int(node.arg(2, "start") or 0), size), size)
    end = node.arg(3, "end")
    end = size if end is None else min(_dim(int(end), size), size)
    cuts = [0]
    for segment in state.segments:
        cuts.append(cuts[-1] + segment)
    if begin in cuts and end in cuts and int(node.arg(4, "step", 1) or 1) == 1:
        return state.at(at, state.segments[cuts.index(begin) : cuts.index(end)])
    wanted = end - begin
    hint = (wanted,) * (size // wanted) if len(state.segments) == 1 and size % wanted == 0 else None
    raise Stop("a slice of the split dimension", state.origin, segments=hint)


def _pieces(graph: Graph, node: GraphNode, states: States, tp: int) -> tuple[SplitDimension, ...]:
    """``split``, ``split_with_sizes`` and ``chunk``."""
    state = _first(node, states)
    shape = graph.shape(node.args[0])
    at = _dim(int(node.arg(2, "dim", 0)), len(shape))
    size = shape[at]
    given = node.args[1]
    if isinstance(given, (list, tuple)):
        sizes = tuple(int(n) for n in given)
    else:
        each = -(-size // int(given)) if node.op == "chunk" else int(given)
        sizes = tuple(min(each, size - begin) for begin in range(0, size, each))
    if at != state.dim:
        return (state,) * len(sizes)
    if state.segments == sizes:
        return tuple(state.at(at, (n,)) for n in sizes)
    hint = sizes if len(state.segments) == 1 and all(n % tp == 0 for n in sizes) else None
    raise Stop("the split dimension is cut into pieces", state.origin, segments=hint)


def _getitem(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    result = states[node.args[0].name]
    if isinstance(result, SplitDimension):
        raise Stop("an item of a split value", result.origin)
    return result[int(node.args[1])]


def _cat(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    parts = list(refs(node.args[0]))
    rank = len(graph.shape(parts[0]))
    at = _dim(int(node.arg(1, "dim", 0)), rank + (node.op == "stack"))
    results = [_of(part, states) for part in parts]
    whole = next((p for p, state in zip(parts, results, strict=True) if state is None), None)
    first = next(state for state in results if state is not None)
    if whole is not None:
        raise Stop(
            f"{node.op} of a split value and a whole one",
            first.origin,
            needs=whole.name,
            dim=first.dim,
        )
    own = [state for state in results if state is not None]
    if node.op == "stack":
        if any((s.dim, s.segments) != (first.dim, first.segments) for s in own):
            raise Stop("stack of values that are split differently", first.origin)
        return first.at(first.dim + (at <= first.dim))
    if at == first.dim and all(s.dim == at for s in own):
        return first.at(at, tuple(n for s in own for n in s.segments))
    if any((s.dim, s.segments) != (first.dim, first.segments) for s in own):
        raise Stop("cat of values that are split differently", first.origin)
    return first


def _along(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    """``softmax`` and others that work along one dimension and keep the shape."""
    state = _first(node, states)
    if _dim(int(node.arg(1, "dim")), len(graph.shape(node.args[0]))) == state.dim:
        raise Stop(f"{node.op} works along the split dimension", state.origin)
    return state


def _reduce(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    rank = len(graph.shape(node.args[0]))
    given = node.arg(1, "dim")
    if given is None or given == []:
        raise Stop(f"{node.op} over all elements", state.origin)
    dims = [_dim(int(d), rank) for d in (given if isinstance(given, (list, tuple)) else [given])]
    if state.dim in dims:
        raise Stop(f"{node.op} over the split dimension", state.origin)
    if len(node.shape or ()) == rank:
        return state
    return state.at(state.dim - sum(d < state.dim for d in dims))


def _norm(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    state = _first(node, states)
    if state.dim >= len(graph.shape(node.args[0])) - len(node.args[1]):
        raise Stop(f"{node.op} over the split dimension", state.origin)
    return state


def _matmul(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    if len(graph.shape(node.args[0])) < 3 or len(graph.shape(node.args[1])) < 3:
        raise Stop("a product without batch dimensions", _origin(node, states))
    return joined(graph, node, states, node.args[:2], upto=2)


def _attention(graph: Graph, node: GraphNode, states: States, tp: int) -> SplitDimension:
    parts = node.args[:3]
    rank = len(graph.shape(parts[0]))
    split_dimension: SplitDimension | None = None
    for part in parts:
        split_dimension = split_dimension or _of(part, states)
    mask = node.arg(3, "attn_mask")
    if split_dimension is None:
        mask_state = _of(mask, states)
        assert mask_state is not None
        raise Stop(
            "attention whose mask alone is split",
            mask_state.origin,
            needs=parts[0].name,
            dim=mask_state.dim,
        )
    if split_dimension.dim != rank - 3:
        raise Stop("attention that is split other than by heads", split_dimension.origin)
    for part in parts:
        state = _of(part, states)
        if state is None:
            raise Stop(
                "attention of split and whole",
                split_dimension.origin,
                needs=part.name,
                dim=rank - 3,
            )
        if state.dim != rank - 3 or len(state.segments) > 1:
            raise Stop("attention that is split other than by heads", state.origin)
    if isinstance(mask, Ref) and _of(mask, states) is None:
        shape = graph.shape(mask)
        if len(shape) >= 3 and shape[-3] > 1:
            raise Stop(
                "attention with a whole mask of every head",
                split_dimension.origin,
                needs=mask.name,
                dim=len(shape) - 3,
            )
    return split_dimension


_RULES: dict[str, _Rule] = {
    "view": _view,
    "reshape": _view,
    "_unsafe_view": _view,
    "view_as": _view,
    "flatten": _flatten,
    "unflatten": _view,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": _turned,
    "numpy_T": _turned,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "select": _select,
    "unbind": _unbind,
    "slice": _slice,
    "split": _pieces,
    "split_with_sizes": _pieces,
    "chunk": _pieces,
    "getitem": _getitem,
    "cat": _cat,
    "stack": _cat,
    "softmax": _along,
    "_softmax": _along,
    "log_softmax": _along,
    "cumsum": _along,
    "mean": _reduce,
    "sum": _reduce,
    "amax": _reduce,
    "var": _reduce,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "matmul": _matmul,
    "bmm": _matmul,
    "scaled_dot_product_attention": _attention,
}
