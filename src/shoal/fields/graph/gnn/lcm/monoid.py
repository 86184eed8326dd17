"""Learned commutative operators, and the balanced tree that folds all sets with them at once.

Source: Ong and Veličković, Learnable Commutative Monoids for Graph Neural Networks, 2022.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.graph.gnn.protocols import GnnError
from shoal.fields.graph.gnn.segments import check_segments, shuffled

# Triples of states whose associativity is looked at in a step.
_TRIPLES = 64


@functools.cache
def native() -> ctypes.CDLL | None:
    """The functions of ``kernel.cpp``; None where they cannot be built: PyTorch's do the same."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    flags = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512")
    try:
        library = build(source, name="lcm", flags=flags)
    except BuildError:
        return None
    for name, pointers in (("forward", 5), ("backward", 7)):
        function = getattr(library, f"lcm_{name}")
        function.argtypes = (ctypes.c_int64,) * 2 + (ctypes.c_void_p,) * pointers
        function.restype = None
    return library


def tree_fold(
    x: Tensor,
    ptr: Tensor,
    combine: Callable[[Tensor], Tensor],
    identity: Tensor,
    *,
    order: Tensor | None = None,
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Fold every set in a balanced tree: on each level one call for the pairs of all sets.

    Vectors ``2j`` and ``2j + 1`` of a set are a pair; the last of an odd number is paired with the
    identity. A set of one vector is that vector, an empty one is the identity. The largest set
    decides the number of levels, ``ceil(log2(n))``.

    Args:
        x: [n, d].
        ptr: int64 [S + 1], of the sets.
        combine: pairs [m, 2, d] to [m, d].
        identity: [d].
        order: int64 [n], rows in the order in which they are folded; None for their own.
        watch: called with the vectors of each level.

    Returns:
        [S, d].
    """
    sizes = ptr.diff()
    alive = torch.arange(len(sizes), device=ptr.device)
    begin = ptr[:-1]
    none = sizes == 0
    ready = [identity.expand(int(none.sum()), -1)]
    places = [alive[none]]
    while True:
        single = sizes == 1
        if bool(single.any()):
            rows = begin[single]
            ready.append(x[rows if order is None else order[rows]])
            places.append(alive[single])
        more = sizes > 1
        alive, begin, sizes = alive[more], begin[more], sizes[more]
        if not len(alive):
            break
        odd = sizes & 1
        if order is None and int(sizes.sum()) == len(x) and not bool(odd.any()):
            pairs = x.view(-1, 2, x.shape[1])
        else:
            pairs = _paired(x, begin, sizes, odd, identity, order)
        order = None
        x = combine(pairs)
        sizes = (sizes + odd) // 2
        begin = sizes.cumsum(0) - sizes
        if watch is not None:
            watch(x)
    return torch.cat(ready)[torch.argsort(torch.cat(places))]


def _paired(
    x: Tensor, begin: Tensor, sizes: Tensor, odd: Tensor, identity: Tensor, order: Tensor | None
) -> Tensor:
    """The vectors of sets with more than one, in pairs [m, 2, d]."""
    padded = sizes + odd
    ends = padded.cumsum(0)
    total = int(ends[-1])
    shift = begin - (ends - padded)
    rows = torch.arange(total, device=x.device) + torch.repeat_interleave(shift, padded)
    last = ends[odd.bool()] - 1
    rows[last] = 0
    if order is not None:
        rows = order[rows]
    rows[last] = len(x)
    return torch.cat([x, identity[None]])[rows].view(-1, 2, x.shape[1])


class GRUPair(nn.Module):
    """Half of ``G(a, b) + G(b, a)``, with a gated recurrent unit G of state a and input b.

    Args:
        width: d, numbers of a vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs [m, 2, d] to [m, d]; each vector is multiplied once, as input and as state."""
        cell = self.cell
        matrix = torch.cat([cell.weight_ih, cell.weight_hh])
        offset = torch.cat([cell.bias_ih, cell.bias_hh])
        apply: Any = _GRUPairFunction.apply
        result: Tensor = apply(pairs, matrix, offset)
        return result


class _GRUPairFunction(torch.autograd.Function):
    """Both orders at once, with a backward pass in few operators that keeps little."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
        m, _, d = pairs.shape
        both = torch.addmm(offset, pairs.reshape(-1, d), matrix.t()).view(m, 2, 6 * d)
        kernel = native() if both.dtype == torch.float32 and both.device.type == "cpu" else None
        if kernel is None:
            gates, new, mean = _gated(both, pairs)
        else:
            pairs = pairs.contiguous()
            gates, new, mean = (both.new_empty(m, *rest) for rest in ((2, 2 * d), (2, d), (d,)))
            tensors = (both, pairs, gates, new, mean)
            kernel.lcm_forward(m, d, *(one.data_ptr() for one in tensors))
        ctx.kernel = kernel
        ctx.save_for_backward(pairs, matrix, gates, new, both)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs, matrix, gates, new, both = ctx.saved_tensors
        m, _, d = pairs.shape
        if ctx.kernel is None:
            of_both, kept = _gated_back(grad, both, pairs, gates, new)
        else:
            grad, of_both, kept = grad.contiguous(), torch.empty_like(both), torch.empty_like(pairs)
            tensors = (grad, both, pairs, gates, new, of_both, kept)
            ctx.kernel.lcm_backward(m, d, *(one.data_ptr() for one in tensors))
        flat = of_both.view(-1, 6 * d)
        of_pairs = torch.addmm(kept.view(-1, d), flat, matrix).view_as(pairs)
        return of_pairs, flat.t() @ pairs.reshape(-1, d), flat.sum(0)


def _gated(both: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [m, 2, 2 d], new states [m, 2, d] and the mean of both orders [m, d], of products."""
    d = pairs.shape[-1]
    # Products as an input are those of the other vector of the pair.
    given, own = both[..., : 3 * d].flip(1), both[..., 3 * d :]
    gates = torch.sigmoid_(given[..., : 2 * d] + own[..., : 2 * d])
    reset, update = gates[..., :d], gates[..., d:]
    new = torch.tanh_(torch.addcmul(given[..., 2 * d :], reset, own[..., 2 * d :]))
    return gates, new, torch.lerp(new, pairs, update).mean(1)


def _gated_back(
    grad: Tensor, both: Tensor, pairs: Tensor, gates: Tensor, new: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the products, and of the pairs as far as they were kept."""
    d = pairs.shape[-1]
    reset, update, own = gates[..., :d], gates[..., d:], both[..., 5 * d :]
    of_state = (grad / 2)[:, None]
    kept = of_state * update
    of_new = (of_state - kept) * (1 - new * new)
    of_gates = torch.cat([of_new * own, of_state * (pairs - new)], -1) * (gates - gates * gates)
    other = torch.cat([of_gates, of_new], -1).flip(1)
    return torch.cat([other, of_gates, of_new * reset], -1), kept


class MLPPair(nn.Module):
    """Half of ``G(a, b) + G(b, a)``, with a perceptron G of both vectors and one hidden layer.

    Args:
        width: d, numbers of a vector, and of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.hidden = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs [m, 2, d] to [m, d]."""
        one = torch.relu(self.hidden(pairs.flatten(1)))
        other = torch.relu(self.hidden(pairs.flip(1).flatten(1)))
        result: Tensor = self.out((one + other) / 2)
        return result


class Symmetrised(nn.Module):
    """Half of ``G(a, b) + G(b, a)`` for any function G.

    Args:
        function: of [m, d] and [m, d] to [m, d].
        width: d.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function, self.width = function, width

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs [m, 2, d] to [m, d]."""
        a, b = pairs.unbind(1)
        return (self.function(a, b) + self.function(b, a)) / 2


class MonoidFold(nn.Module):
    """``dec(enc(x_1) o ... o enc(x_n))`` with a learned operator: an :class:`Aggregator`.

    The identity of the operator is learned too; it fills odd levels, and is what an empty set folds
    to. In training each set is folded in a random order.

    Args:
        width: d, numbers of a vector.
        pair: the operator, pairs [m, 2, d] to [m, d], with an attribute ``width``.
        associative_weight: of the penalty on ``(a o b) o c - a o (b o c)``, squared and averaged
            over triples of states of all levels.
        identity_weight: of the penalty on ``a o e - a``.

    Raises:
        GnnError: the operator has another width.
    """

    def __init__(
        self,
        width: int,
        pair: nn.Module,
        *,
        associative_weight: float = 0.1,
        identity_weight: float = 0.1,
    ) -> None:
        super().__init__()
        if pair.width != width:
            raise GnnError(f"operator: a width of {pair.width}; expected the hidden width {width}")
        self.width, self.pair = width, pair
        self.weights = associative_weight, identity_weight
        self.identity = nn.Parameter(torch.zeros(width))
        self.encode, self.decode = nn.Linear(width, width), nn.Linear(width, width)
        self._penalty: Tensor | None = None

    def forward(self, x: Tensor, ptr: Tensor) -> Tensor:
        """See :class:`Aggregator`."""
        check_segments(x, ptr, self.width)
        z = self.encode(x)
        watched = [z.detach()]
        shuffle = self.training
        folded = tree_fold(
            z, ptr, self.pair, self.identity, order=shuffled(ptr) if shuffle else None,
            watch=(lambda level: watched.append(level.detach())) if shuffle else None,
        )  # fmt: skip
        self._penalty = None
        if shuffle and any(self.weights) and len(x):
            self._penalty = self._laws(watched)
        result: Tensor = self.decode(folded)
        return result

    def _laws(self, levels: list[Tensor]) -> Tensor:
        """How far the operator is from associative, and the vector from its identity."""
        # As many of each level: most states are near the leaves.
        each = -(-3 * _TRIPLES // len(levels))
        states = torch.cat([level[torch.randint(len(level), (each,))] for level in levels])
        a, b, c = states[torch.randperm(len(states))[: 3 * _TRIPLES]].chunk(3)
        identity = self.identity.expand_as(a)
        first = torch.stack([torch.cat([a, b, a]), torch.cat([b, c, identity])], 1)
        ab, bc, alone = self.pair(first).chunk(3)
        left, right = self.pair(torch.stack([torch.cat([ab, a]), torch.cat([c, bc])], 1)).chunk(2)
        associative: Tensor = (left - right).square().mean()
        unchanged: Tensor = (alone - a).square().mean()
        return self.weights[0] * associative + self.weights[1] * unchanged

    def penalty(self) -> Tensor:
        """The weighted penalties on the laws of a monoid."""
        return torch.zeros(()) if self._penalty is None else self._penalty
