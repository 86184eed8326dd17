"""Hybrid sharding: ZeRO stage 3 inside groups of ranks, replication across them.

Parameters are gathered inside a group, where links are fast, and only the gradients of a
rank's own part cross to the other groups: of n parameter bytes and groups of w ranks, n / w.

Source: Zhao et al., PyTorch FSDP, 2023, section 3.2.2 (hybrid sharding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.arithmetic import parameters
from shoal.ir import Estimate, Interval, Machine, Work
from shoal.parallel.shard.cost import group_link
from shoal.parallel.shard.fsdp import divided
from shoal.parallel.shard.units import on_one_node

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.protocols import Comm, ShardedModel


@part
class HybridShard:
    """Shard within groups and replicate across them; choose it where links within nodes are faster.

    Args:
        within: neighbouring data-parallel ranks of a group; those of one node if not given.
    """

    within: int | None = None
    divides: ClassVar[frozenset[str]] = frozenset({"weights", "gradients", "optimizer"})
    traits: ClassVar[frozenset[str]] = frozenset(f"shards_{what}" for what in divides) | {
        "copies_weights"
    }

    def __post_init__(self) -> None:
        require(
            self.within is None or self.within >= 2,
            "shard.hybrid.within",
            self.within,
            expected="2 ranks or more",
            hint="shard: replicated divides nothing",
        )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Two gathers and a reduce-scatter inside a group, an all-reduce of parts across."""
        job = work.job
        ranks = job.parallel.dp * job.parallel.cp
        apart = job.parallel.tp
        within = self.within or max(1, machine.devices_per_node // apart)
        within = min(within, ranks)
        groups = -(-ranks // within)
        micro = job.global_batch // job.parallel.dp
        passes = max(1, micro // (job.microbatch or micro))
        share = 4.0 * parameters(work.shape) / (job.parallel.tp * job.parallel.pp)
        inside = share * (1.0 + 2.0 * passes) * (within - 1) / within
        across = 2.0 * share / within * (groups - 1) / groups
        units = work.shape.num_layers + 1
        seconds, wire = 0.0, dict[str, float]()
        for sent, members, span, calls in (
            (inside, within, apart * within, (1 + 2 * passes) * units),
            (across, groups, apart * ranks, 2 * units),
        ):
            link = group_link(machine, span)
            if members > 1 and link is not None:
                seconds += sent / link.bandwidth + calls * (members - 1) * link.latency_s
                wire[link.scope] = wire.get(link.scope, 0.0) + sent
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"collective": seconds},
            wire_bytes=wire,
        )

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Shard the model inside this rank's group."""
        within = self.within or on_one_node(comm)
        require(
            comm.world % within == 0 and within > 1,
            "shard.hybrid.within",
            within,
            expected=f"a divisor of the {comm.world} data-parallel ranks, 2 or more",
            hint="or use shard: zero3, or replicated",
        )
        starts = range(0, comm.world, within)
        inside = comm.split([range(start, start + within) for start in starts])
        across = comm.split([range(i, comm.world, within) for i in range(within)])
        return divided(model, inside, reshard=True, whole_matrices=whole_matrices, across=across)
