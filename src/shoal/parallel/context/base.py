"""What all context-parallel parts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shoal.core.errors import require
from shoal.cost.context.traffic import ContextTraffic, ring_traffic
from shoal.ir import Estimate, Machine, Work
from shoal.parallel.context.cost import Route, context_estimate
from shoal.parallel.context.positions import contiguous, zigzag

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.ir.mask import Mask
    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


class ContextAttention:
    """Base of the parts: a part adds ``_run``; ``traffic`` and ``check`` where a ring's do not fit.

    Attributes:
        paired: a rank holds an early and a late chunk, so that causal work is balanced.
    """

    name: ClassVar[str]
    paired: ClassVar[bool]

    def positions(self, length: int, world: int) -> list[np.ndarray]:
        """Positions int64 [length / world] of each rank.

        Raises:
            ConfigError: a length that the ranks cannot share; names those that they could.
        """
        deal = zigzag if self.paired else contiguous
        return deal(length, world, where=f"context.{self.name}")

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Whether ``world`` ranks can share these heads; by sequence they always can.

        Raises:
            ConfigError: they cannot; says what could.
        """

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """What one rank sends for one layer if no block is wholly masked; that of a ring.

        Args:
            tokens: queries of one rank, n (times sequences).
            heads: query heads of one rank.
            kv_heads: key/value heads of one rank.
            head_dim: width of a head.
            world: context-parallel ranks N.
        """
        return ring_traffic(tokens, heads, kv_heads, head_dim, world)

    def routes(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> list[Route]:
        """The same by the ranks among which it goes."""
        return [Route(self.traffic(tokens, heads, kv_heads, head_dim, world), world)]

    def wire_elements(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> tuple[int, int]:
        """Elements that one rank sends in the forward and in the backward pass of a layer."""
        result = self.traffic(tokens, heads, kv_heads, head_dim, world)
        return result.forward.elements, result.backward.elements

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask], comm: Comm) -> Tensor:
        """Softmax attention of this rank's queries over every rank's keys; has a gradient.

        Args:
            q: [B, H, T / world, d], at this rank's positions.
            k: [B, K, T / world, d].
            v: [B, K, T / world, d].
            masks: of the whole sequences [T, T]; one for all rows, or one a row.
            comm: the context-parallel ranks.

        Returns:
            [B, H, T / world, d]; zero where nothing is seen.

        Raises:
            ConfigError: shapes, heads or masks that do not fit.
        """
        import torch

        from shoal.parallel.context.run.peers import PeerView

        self._check_inputs(q, k, v, masks, comm.world)
        self.check(q.shape[1], k.shape[1], comm.world)
        positions = self.positions(q.shape[2] * comm.world, comm.world)
        # Statistics stay in their wide type whatever the caller's autocast says.
        with torch.autocast(q.device.type, enabled=False):
            return self._run(q, k, v, PeerView(tuple(masks), q.shape[0], positions), comm)

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends for the attention of one step, and the seconds not hidden."""
        return context_estimate(self.routes, self.paired, work, machine)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        raise TypeError(f"{type(self).__name__} cannot run")

    def _check_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask], world: int
    ) -> None:
        where = f"context.{self.name}"
        shape = tuple(q.shape)
        require(
            q.ndim == 4
            and k.shape == v.shape
            and (*shape[:1], *shape[2:]) == (*k.shape[:1], *k.shape[2:])
            and shape[1] % k.shape[1] == 0
            and q.dtype == k.dtype == v.dtype,
            f"{where}: shapes of q, k, v",
            f"{q.dtype} {list(q.shape)}, {k.dtype} {list(k.shape)}, {v.dtype} {list(v.shape)}",
            expected="one type, [B, H, n, d] and twice [B, K, n, d] with K a divisor of H",
        )
        require(
            len(masks) in (1, shape[0]),
            f"{where}: number of masks",
            len(masks),
            expected=f"1, or one for each of {shape[0]} rows",
        )
        length = shape[2] * world
        for mask in masks:
            require(
                (mask.num_queries, mask.num_keys) == (length, length),
                f"{where}: shape of the mask",
                [mask.num_queries, mask.num_keys],
                expected=f"[{length}, {length}]: {world} ranks with {shape[2]} positions each",
            )


def near_ranks(work: Work, machine: Machine) -> int:
    """Ranks of a node that share a sequence, where they and their like on other nodes do; else 1.

    Ranks that differ in ``cp`` stand ``tp`` apart.
    """
    split = work.job.parallel
    near = machine.devices_per_node // split.tp
    return near if 1 < near < split.cp and split.cp % near == 0 else 1


def group_of(size: int, world: int, *, where: str) -> int:
    """Ranks of a group of neighbours: ``size``, or all where there are fewer.

    Args:
        size: the requested size.
        world: ranks that share a sequence.
        where: names the option in errors.

    Raises:
        ConfigError: groups of that size do not divide the ranks.
    """
    group = min(size, world)
    require(world % group == 0, where, size, expected=f"a divisor of cp = {world}")
    return group
