"""A recurrent network over sets of any sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.fields.graph.gnn.segments import check_segments, shuffled

# Pairs of neighbours whose swaps are looked at in a step.
_PAIRS = 64


class Recurrent(nn.Module):
    """``torch.nn.GRU`` over the vectors of each set: an :class:`Aggregator`.

    The state after the last vector is the result; that of an empty set is the first state, 0. In
    training each set comes in a random order. Sets whose sizes lie between the same powers of two
    are run together, and padded to the largest of them.

    Args:
        width: numbers of a vector, and of a state.
        order_weight: of the penalty on ``f(f(s, a), b) - f(f(s, b), a)``, squared and averaged over
            states s and vectors a and b.
    """

    def __init__(self, width: int, *, order_weight: float = 0.1) -> None:
        super().__init__()
        self.width, self.order_weight = width, order_weight
        self.gru = nn.GRU(width, width)
        self._penalty: Tensor | None = None

    def forward(self, x: Tensor, ptr: Tensor) -> Tensor:
        """See :class:`Aggregator`."""
        check_segments(x, ptr, self.width)
        self._penalty = None
        sizes = ptr.diff()
        parts = [(sizes == 0).nonzero()[:, 0]]
        ready = [x[:0].sum(0).expand(len(parts[0]), -1)]
        seen = []
        order = shuffled(ptr) if self.training else None
        for sets in _alike(sizes):
            lengths = sizes[sets]
            # Behind the last vector of a set it comes again; no state of that is used.
            step = torch.minimum(torch.arange(int(lengths.max()))[:, None], lengths - 1)
            rows = ptr[sets] + step
            states, _ = self.gru(x[rows if order is None else order[rows]])
            ready.append(states[lengths - 1, torch.arange(len(sets))])
            parts.append(sets)
            seen.append(states.detach().flatten(0, 1))
        if self.training and self.order_weight and len(x):
            self._penalty = self.order_weight * self._swapped(x.detach(), seen)
        return torch.cat(ready)[torch.argsort(torch.cat(parts))]

    def _swapped(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        """How far two vectors in another order lead apart, on average."""
        some = torch.cat([states[torch.randint(len(states), (_PAIRS,))] for states in seen])
        s = some[torch.randint(len(some), (_PAIRS,))]
        a, b = x[torch.randint(len(x), (2, _PAIRS))]
        both = torch.stack([torch.cat([a, b]), torch.cat([b, a])])
        _, last = self.gru(both, torch.cat([s, s])[None])
        one, other = last[0].chunk(2)
        result: Tensor = (one - other).square().mean()
        return result

    def penalty(self) -> Tensor:
        """The weighted penalty on the order of vectors."""
        return torch.zeros(()) if self._penalty is None else self._penalty


def _alike(sizes: Tensor) -> Iterator[Tensor]:
    """Sets that are not empty, those of sizes between the same powers of two together."""
    level = torch.ceil(torch.log2(sizes.clamp(min=1).double())).long()
    level[sizes == 0] = -1
    for one in torch.unique(level).tolist():
        if one >= 0:
            yield (level == one).nonzero()[:, 0]
