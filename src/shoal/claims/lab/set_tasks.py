"""The second smallest of a set of integers, learned by a network that pools with any aggregator.

Source: Ong and Veličković, Learnable Commutative Monoids for Graph Neural Networks, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.extras import import_extra
from shoal.core.random import seed64
from shoal.fields.graph.gnn.network import aggregator_of

_BITS = 6
_MOST = 2**_BITS
# Learning rate at the beginning; it falls to 0 along half a cosine.
_RATE = 4e-3
# Loss of a step is that of this many sets.
_BATCH = 128


class SetNetwork(nn.Module):
    """Bits of each integer to a vector, an aggregator, and bits of the answer.

    Args:
        aggregator: a part of kind ``aggregator``, perhaps with options.
        width: numbers of a vector.
    """

    def __init__(self, aggregator: Any, width: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(_BITS, width), nn.ReLU(), nn.Linear(width, width))
        self.pool = aggregator_of(aggregator, width)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _BITS))

    def forward(self, values: Tensor, ptr: Tensor) -> Tensor:
        """Scores of the bits, [S, 6].

        Args:
            values: int64 [n], of all sets.
            ptr: int64 [S + 1].
        """
        scores: Tensor = self.leave(self.pool(self.enter(bits_of(values)), ptr))
        return scores

    def penalty(self) -> Tensor:
        """What the aggregator adds to the loss."""
        pool: Any = self.pool  # an Aggregator
        added: Tensor = pool.penalty()
        return added


def bits_of(values: Tensor) -> Tensor:
    """Bits of integers below 64, as -1 and 1, float32 [n, 6]."""
    return (values[:, None] >> torch.arange(_BITS) & 1).float() * 2 - 1


def drawn_sets(sizes: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Integers of sets, their pointer, and the second smallest of each; one may come twice.

    The integers of a set are above a bound of its own. Else the answer for a large set would be
    almost always the same.

    Args:
        sizes: int64 [S], at least 2.
        draw: what is random.
    """
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    low = torch.randint(_MOST, (len(sizes),), generator=draw)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    share = torch.rand(int(ptr[-1]), dtype=torch.float64, generator=draw)
    values = low[owner] + (share * (_MOST - low[owner])).long()
    ordered = torch.argsort(owner * _MOST + values, stable=True)
    return values, ptr, values[ordered[ptr[:-1] + 1]]


def learned(
    aggregator: Any,
    *,
    steps: int,
    seed: int,
    width: int = 64,
    largest: int = 16,
    progress: Callable[[float], None] = lambda done: None,
) -> SetNetwork:
    """Train a network on sets of 2 to ``largest`` integers.

    Args:
        aggregator: a part of kind ``aggregator``, perhaps with options.
        steps: of Adam, 128 sets each.
        seed: of parameters and sets.
        width: numbers of a vector.
        largest: size of a set at most.
        progress: called with the share that is done.
    """
    draw = torch.Generator().manual_seed(seed64(seed, purpose="sets that train"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(seed, purpose="set network"))
        network = SetNetwork(aggregator, width)
        optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            sizes = torch.randint(2, largest + 1, (_BATCH,), generator=draw)
            values, ptr, answer = drawn_sets(sizes, draw)
            wanted = (bits_of(answer) + 1) / 2
            scores = network(values, ptr)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted)
            optimizer.zero_grad()
            loss = loss + network.penalty()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress((step + 1) / steps)
    return network.eval()


def accuracy(network: SetNetwork, sizes: list[int], *, sets: int, seed: int) -> dict[int, float]:
    """Share of sets of each size whose answer has all bits right.

    Args:
        network: that was trained.
        sizes: of the sets.
        sets: of each size.
        seed: of the sets.
    """
    draw = torch.Generator().manual_seed(seed64(seed, purpose="sets that test"))
    result = {}
    for size in sizes:
        values, ptr, answer = drawn_sets(torch.full((sets,), size), draw)
        with torch.no_grad():
            right = (network(values, ptr) > 0) == (bits_of(answer) > 0)
        result[size] = float(right.all(1).double().mean())
    return result


def spread(network: SetNetwork, sizes: list[int], *, sets: int, times: int, seed: int) -> float:
    """Deviation of a predicted probability over random orders of a set, on average.

    Args:
        network: that was trained.
        sizes: of the sets.
        sets: of each size.
        times: orders of each set.
        seed: of sets and orders.
    """
    draw = torch.Generator().manual_seed(seed64(seed, purpose="orders"))
    found = []
    for size in sizes:
        values, ptr, _ = drawn_sets(torch.full((sets,), size), draw)
        rows = values.view(sets, size)
        said = []
        for _ in range(times):
            order = torch.rand(rows.shape, generator=draw).argsort(1)
            with torch.no_grad():
                said.append(torch.sigmoid(network(rows.gather(1, order).flatten(), ptr)))
        found.append(float(torch.stack(said).std(0, correction=0).mean()))
    return sum(found) / len(found)


class GRUOneWay(nn.Module):
    """A gated recurrent unit of the first vector of a pair as state: not symmetric.

    Args:
        width: d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        """Pairs [m, 2, d] to [m, d]."""
        result: Tensor = self.cell(pairs[:, 1], pairs[:, 0])
        return result


def operations(name: str, size: int, width: int = 8) -> int:
    """Operations of an aggregator that followed one another on one set: calls of its operator.

    A recurrent layer calls its cell once for each step of the sequence that it was given.

    Args:
        name: ``lcm`` or any aggregator with a layer of ``torch.nn.GRU``.
        size: of the set.
        width: of a vector.
    """
    module = aggregator_of(name, width).eval()
    calls = []
    for inner in module.modules():
        if isinstance(inner, nn.GRU):
            inner.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
        elif inner is getattr(module, "pair", None):
            inner.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        module(torch.zeros(size, width), torch.tensor([0, size]))
    return sum(calls)


def training_step(name: Any, sets: int, size: int, width: int, seed: int) -> Callable[[], None]:
    """Both passes of an aggregator in training, its penalty included.

    Args:
        name: of the aggregator, perhaps with options.
        sets: that are pooled at once.
        size: of each.
        width: of a vector.
        seed: of parameters and vectors.
    """
    torch.manual_seed(seed)
    module: Any = aggregator_of(name, width)
    x = torch.randn(sets * size, width, requires_grad=True)
    ptr = torch.arange(0, sets * size + 1, size)

    def step() -> None:
        (module(x, ptr).sum() + module.penalty()).backward()

    return step


def geometric_step(sets: int, size: int, width: int, seed: int) -> Callable[[], None]:
    """Both passes of torch-geometric's ``GRUAggregation``, which has no penalty.

    Args:
        sets: that are pooled at once.
        size: of each.
        width: of a vector.
        seed: of parameters and vectors.
    """
    aggr: Any = import_extra(
        "torch_geometric.nn.aggr", extra="graph", purpose="a peer of the claim"
    )
    torch.manual_seed(seed)
    module = aggr.GRUAggregation(width, width)
    x = torch.randn(sets * size, width, requires_grad=True)
    index = torch.repeat_interleave(torch.arange(sets), size)

    def step() -> None:
        module(x, index=index, dim_size=sets).sum().backward()

    return step
