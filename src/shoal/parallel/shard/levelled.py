"""A model whose weights, gradients and optimizer state are divided over groups of different sizes.

The ranks 0 to n - 1 form packages of g0 neighbours, and islands of g1: rank r is number i of
package q of island k, r = k g1 + q g0 + i. As in ZeRO 3 a parameter is cut in n parts by rows, and
rank r's optimizer updates part r. Beside it a rank keeps, in the type that travels, the parts of
all ranks with its i, so its package together has all of them; and of gradients it sums the parts
of all ranks with its q and i.

==================  ===========================  ==========================================
after an update     all-gather over the k        one part of each rank
                    all-gather over the q        what the first one brought: packed bytes
                                                 are passed on as they are
before a pass       all-gather over the i        n / g0 parts of each rank
after a micro-batch reduce-scatter over (q, i)   n parts of each rank
before an update    reduce-scatter over the k    n / g1 parts of each rank
==================  ===========================  ==========================================

With g0 = n nothing is gathered after an update, and islands may be of any size. There may then be a
second copy over fewer ranks, taken when the forward pass gathers, which the recomputation in a
backward pass gathers from (ZeRO++).

Sources: Xu et al., Scaling Large Language Model Training on Frontier with Low-Bandwidth
Partitioning, 2025, section 3; Wang et al., ZeRO++, 2023, section 3.2 (the second copy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from shoal.memory.activations.protocol import in_backward
from shoal.parallel.comm.compress import gather_packed, pack, reduce_scatter_packed, unpack
from shoal.parallel.shard.gathered import GatheredModel, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm


class LevelComms(NamedTuple):
    """The communicators of a rank, by what differs between their ranks.

    Args:
        package: the g0 neighbours, which differ in i.
        peers: ranks of an island with the same i, which differ in q.
        island: the g1 neighbours.
        across: ranks with the same place in all islands, which differ in k.
        second: the ranks that share a second copy of the weights; None without one.
    """

    package: Comm
    peers: Comm
    island: Comm
    across: Comm
    second: Comm | None

    @classmethod
    def of(cls, comm: Comm, package: int, island: int, second: int | None) -> LevelComms:
        """Split ``comm``; all ranks call it with the same numbers.

        Args:
            comm: n ranks.
            package: g0, a divisor of ``island``, or n.
            island: g1, a divisor of n.
            second: ranks that share a second copy.
        """
        world = comm.world

        def within(size: int) -> list[range]:
            return [range(start, start + size) for start in range(0, world, size)]

        share = min(package, island)  # with g0 = n no rank has peers
        peers = [
            range(start + i, start + island, share)
            for start in range(0, world, island)
            for i in range(share)
        ]
        return cls(
            comm.split(within(package)),
            comm.split(peers),
            comm.split(within(island)),
            comm.split([range(j, world, island) for j in range(island)]),
            None if second is None else comm.split(within(second)),
        )


class Width(NamedTuple):
    """The number format of messages.

    Args:
        dtype: of weights and gradients on the wire and of the copies; None for the masters' own.
        weights: bits of a weight on the wire and in the copies; None for ``dtype``.
        gradients: bits of a gradient on the wire; None for ``dtype``.
    """

    dtype: torch.dtype | None = None
    weights: int | None = None
    gradients: int | None = None


class _LevelledUnit(Unit):
    """Parameters of one type that are gathered together, with copies of their own."""

    owner: LevelledModel

    def __init__(self, whole: Sequence[nn.Parameter], owner: GatheredModel) -> None:
        assert isinstance(owner, LevelledModel)
        super().__init__(whole, owner)
        vectors = all(len(shape) < 2 for shape in self.shapes)
        # Norms and biases are few, and would be lost beside large numbers in a block.
        self.width = owner.width._replace(weights=None, gradients=None) if vectors else owner.width
        self.copy: Tensor | None = None
        """What this rank keeps of the weights as they travel, [n / g0, wire]."""
        self.second: Tensor | None = None
        """Its share of the second copy, [n / ranks, wire]."""
        self.sums: Tensor | None = None
        """Its sums of gradients over the island, [n / g1, part]."""

    @property
    def _dtype(self) -> torch.dtype:
        return self.width.dtype or self.flat.dtype

    def everything(self) -> Tensor:
        """Every rank's part, as its neighbours' copies have it: [n, part]."""
        levels, bits = self.owner.levels, self.width.weights
        if levels.second is not None and self.second is not None and in_backward():
            result = _assembled(levels.second, self.second)
        else:
            result = _assembled(levels.package, self._own_copy())
            if levels.second is not None:
                shares = result.reshape(-1, levels.second.world, result.shape[1])
                self.second = shares[:, levels.second.rank].clone()
        if bits is not None:
            result = unpack(result, self.flat.numel(), bits)
        return result.to(self.flat.dtype)

    def _own_copy(self) -> Tensor:
        """The parts of all ranks with this one's place in their package."""
        if self.copy is None:
            levels, bits = self.owner.levels, self.width.weights
            mine = self.flat.to(self._dtype) if bits is None else pack(self.flat[None], bits)[0]
            result = mine[None, None]
            if levels.package.world < self.owner.comm.world:
                result = gather_packed(levels.across, mine, tag="parameters")
                result = gather_packed(levels.peers, result, tag="parameters")
            self.copy = result.transpose(0, 1).flatten(0, 1).clone()
        return self.copy

    def forget(self) -> None:
        """The masters have changed, or may: gather the copies anew before the next pass."""
        self.copy = self.second = None

    def receive(self, gradients: Sequence[Tensor]) -> None:
        """Sum gradients of the whole parameters over the island; add them to what is here."""
        island, bits = self.owner.levels.island, self.width.gradients
        parts = self.padded(gradients).view(-1, island.world, self.flat.numel())
        rows = parts.transpose(0, 1).reshape(island.world, -1)
        if bits is not None:
            sums = reduce_scatter_packed(island, rows, bits, tag="gradients").to(self._dtype)
        else:
            rows = rows.to(self._dtype)
            sums = torch.empty_like(rows[0])
            island.reduce_scatter(sums, rows.view(-1), tag="gradients").wait()
        sums = sums.view(-1, self.flat.numel())
        self.sums = sums if self.sums is None else self.sums.add_(sums)

    def scatter(self) -> None:
        """Sum the gradients over the islands; each rank keeps those of its part."""
        if self.sums is None:
            return
        across, bits = self.owner.levels.across, self.width.gradients
        sums, self.sums = self.sums, None
        if bits is not None:
            own = reduce_scatter_packed(across, sums, bits, tag="gradients")
        else:
            own = torch.empty_like(sums[0])
            across.reduce_scatter(own, sums.view(-1), tag="gradients").wait()
        self.keep(own.to(self.flat.dtype))


def _assembled(comm: Comm, mine: Tensor) -> Tensor:
    """Every rank's rows [m, wire], one of each rank after another: [m * ranks, wire]."""
    if comm.world == 1:
        return mine
    return gather_packed(comm, mine, tag="parameters").transpose(0, 1).flatten(0, 1)


class LevelledModel(GatheredModel):
    """See :class:`~shoal.parallel.protocols.ShardedModel`.

    Args:
        model: the model; its parameters become local parts, with the same names.
        comm: all ranks that sum gradients.
        levels: the groups of them.
        width: the number format of messages.
        whole_matrices: the optimizer needs whole matrices.

    Raises:
        ConfigError: there is one rank, or the optimizer needs whole matrices.
    """

    unit = _LevelledUnit

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        levels: LevelComms,
        width: Width,
        *,
        whole_matrices: bool,
    ) -> None:
        self.levels, self.width = levels, width
        super().__init__(model, comm, reshard=True, whole_matrices=whole_matrices)

    def _divide(
        self, parameters: list[nn.Parameter], home: dict[nn.Parameter, tuple[Unit, int]]
    ) -> None:
        """Vectors are gathered apart where matrices travel in few bits."""
        if self.width.weights is None and self.width.gradients is None:
            super()._divide(parameters, home)
            return
        for vectors in (False, True):
            super()._divide([p for p in parameters if (p.dim() < 2) == vectors], home)

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds now of weights (copies), gradients and masters."""
        held_bytes = {"weights": 0, "gradients": 0, "masters": 0}
        for unit in self._units:
            assert isinstance(unit, _LevelledUnit)
            copies = [x for x in (unit.copy, unit.second) if x is not None]
            sums = [x for x in (unit.sums, *(p.grad for p in unit.parts)) if x is not None]
            held_bytes["weights"] += sum(x.untyped_storage().nbytes() for x in copies)
            held_bytes["gradients"] += sum(x.untyped_storage().nbytes() for x in sums)
            held_bytes["masters"] += unit.flat.untyped_storage().nbytes()
        return held_bytes
