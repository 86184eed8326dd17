"""Three-level ZeRO: weights, gradients and optimizer state each divided where the links suit them.

Weights move in every pass, so they are divided over the few ranks with the fastest links between
them; gradients once a micro-batch, over an island, as a node; the optimizer's state once a step,
over all ranks. Of P bytes of weights nothing but P / g1 of gradients and P / g1 of new weights
leaves an island in a step, however many micro-batches it has.

Source: Xu et al., Scaling Large Language Model Training on Frontier with Low-Bandwidth
Partitioning, 2025, section 3; Wang et al., ZeRO++, 2023 (``secondary``, ``quant``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shoal.core.errors import ConfigError, PlanError, ShoalError, require
from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, TrainJob, Work
from shoal.parallel.shard.units import on_one_node

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.protocols import Comm, ShardedModel

BITS: dict[str, dict[str, int]] = {"weights": {"int8": 8}, "grads": {"int4": 4, "int8": 8}}
"""What may travel in few bits, and in how many."""

_MASTERS = ("masters", "optimizer", "moments")


@part
class Topo3:
    """Shard each state over its own level of ranks; choose it for slow links between nodes.

    Args:
        levels: [g0, g1]: number of neighbouring ranks over which weights and gradients are sharded,
            each a divisor of the next and of all ranks; both the ranks of a node if not given. With
            ``secondary``, g0 may be all ranks, independent of g1.
        dtype: dtype of weights and gradients in communication and of the copies of the weights;
            that of the master weights if not given. The master weights, which the optimizer
            updates, keep theirs.
        quant: what is sent quantized in blocks: ``weights: int8``, ``grads: int4`` or ``int8``.
            Sums are in fp32.
        secondary: with recomputation, ranks that keep a second copy of the weights for the
            backward pass; a divisor of g0.
    """

    levels: tuple[int, int] | None = None
    dtype: Literal["bf16", "fp32"] | None = None
    quant: dict[str, str] = field(default_factory=dict)
    secondary: int | None = None
    divides: ClassVar[frozenset[str]] = frozenset({"weights", "gradients", "optimizer"})
    traits: ClassVar[frozenset[str]] = frozenset(f"shards_{what}" for what in divides) | {"levels"}
    # Its estimate knows which ranks are neighbours.
    placed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.levels is not None:
            g0, g1 = self.levels
            wide = self.secondary is not None and g1 >= 1 and g0 % g1 == 0
            require(
                wide or (g0 >= 1 and g1 >= g0 and g1 % g0 == 0),
                "shard.topo3.levels",
                list(self.levels),
                expected="two numbers of ranks, the first a divisor of the second",
            )
            require(
                self.secondary is None or (self.secondary >= 1 and g0 % self.secondary == 0),
                "shard.topo3.secondary",
                self.secondary,
                expected=f"a divisor of the {g0} ranks that share the weights",
            )
        for what, name in self.quant.items():
            if what in _MASTERS:
                raise ConfigError(
                    f"shard.topo3.quant.{what} = {name}: the fp32 masters and the optimizer's "
                    "state never leave their rank, and rounding would lose small updates; quantise "
                    "weights or grads, which travel"
                )
            require(
                what in BITS,
                "shard.topo3.quant",
                what,
                expected=" or ".join(BITS),
            )
            require(
                name in BITS[what],
                f"shard.topo3.quant.{what}",
                name,
                expected=" or ".join(BITS[what]),
                hint="leave it out to send numbers as they are",
            )

    def bits(self, what: str) -> int | None:
        """Bits of a number on the wire; None for those of a type."""
        return BITS[what][self.quant[what]] if what in self.quant else None

    def sizes(
        self, ranks: int, near: int, *, error: type[ShoalError] = ConfigError
    ) -> tuple[int, int]:
        """g0 and g1 among ``ranks``, of which ``near`` stand on one node.

        Raises:
            ShoalError: they are not nested divisors; of the type ``error``.
        """
        if self.levels is None:
            # Of an uneven number of ranks on a node, what all islands can have.
            size = math.gcd(ranks, near)
            return size, size
        g0, g1 = self.levels
        require(
            ranks % g1 == 0 and (g1 % g0 == 0 or g0 == ranks),
            "shard.topo3.levels",
            [g0, g1],
            expected=f"numbers that divide one another and the {ranks} data-parallel ranks",
            hint="or use shard: zero3",
            error=error,
        )
        return g0, g1

    def check(self, job: TrainJob) -> None:
        """Refuse a job whose ranks are no multiple of the levels.

        Raises:
            PlanError: names the levels.
        """
        if self.levels is not None:
            self.sizes(job.parallel.dp * job.parallel.cp, 1, error=PlanError)
        require(
            not job.compile,
            "compile",
            job.compile,
            expected="false with shard topo3, whose weights come and go",
            error=PlanError,
        )

    def kept_bytes(
        self, job: TrainJob, machine: Machine, local: float, block: float
    ) -> dict[str, float]:
        """See :func:`~shoal.parallel.shard.topo3_cost.kept_bytes`."""
        from shoal.parallel.shard.topo3_cost import kept_bytes

        return kept_bytes(self, job, machine, local, block)

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Where some nodes share the gradients: weights over a package, or a node."""
        job, split = work.job, work.job.parallel
        if machine.device.kind == "cpu" or job.compile or split.folded:
            return
        ranks = split.dp * split.cp
        island = max(1, machine.devices_per_node // split.tp)
        if island == 1 or ranks % island or ranks == island:
            return
        package = max(1, machine.devices_per_package // split.tp)
        for size in sorted({island, package} - {1}):
            if island % size == 0:
                yield cls(levels=(size, island))

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """The collectives of each level over that level's own link."""
        from shoal.parallel.shard.topo3_cost import hops

        seconds, wire = 0.0, dict[str, float]()
        for hop in hops(self, work, machine):
            if hop.link is not None and hop.members > 1:
                seconds += hop.sent / hop.link.bandwidth
                seconds += hop.calls * (hop.members - 1) * hop.link.latency_s
                wire[hop.link.scope] = wire.get(hop.link.scope, 0.0) + hop.sent
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"collective": seconds},
            wire_bytes=wire,
        )

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Shard the model over the three levels."""
        import torch

        from shoal.parallel.shard.levelled import LevelComms, LevelledModel, Width

        g0, g1 = self.sizes(comm.world, on_one_node(comm))
        dtype = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]
        return LevelledModel(
            model,
            comm,
            LevelComms.of(comm, g0, g1, self.secondary),
            Width(dtype, self.bits("weights"), self.bits("grads")),
            whole_matrices=whole_matrices,
        )
