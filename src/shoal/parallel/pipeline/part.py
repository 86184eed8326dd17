"""What one rank has of a model: all of it, or the cells of a pipeline that are its own.

A part knows which boxes of whole parameters its tensors are, and sums the gradients that ranks of
one replica share. Its values may be filled in one by one, where they live in tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.boxes import Box
from shoal.kernel.tensors import local
from shoal.parallel.pipeline.stage import LocalModel
from shoal.parallel.protocols import LocalParameter
from shoal.parallel.tensor.slices import Slices, is_expert, take
from shoal.parallel.vocab.passes import VocabShard
from shoal.plan.partition import cells_for

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.ir.schedule import Schedule
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm, MicroBatch, Ranks, Shard, ShardedModel
    from shoal.parallel.tensor.rows import WeightSource

Lent = Callable[[Collection[str]], AbstractContextManager[dict[str, Tensor]]]
"""Name the parameters that are needed -> those that are here, with gradients to be changed."""


class WholePart:
    """The whole model, and what other parts override.

    Attributes:
        slices: parameter -> what this rank holds of it.
        vocab: its shard of the vocabulary, where the pipeline's ranks share that.
    """

    def __init__(self) -> None:
        self.slices: dict[str, Slices] = {}
        self.vocab: VocabShard | None = None

    def value(self, name: str, weights: WeightSource) -> Tensor:
        """What this rank's slice of a parameter starts from."""
        whole = weights.whole(name)
        return take(whole, self.slices[name]) if name in self.slices else whole

    def begin(self, batches: Sequence[MicroBatch], count: float) -> None:
        """A step begins, with these micro-batches and ``count`` counted tokens on all ranks."""

    def sum_gradients(self, lent: Lent) -> None:
        """Sum what ranks of one replica share, after the sums over replicas."""

    def first_holder(self, name: str) -> bool:
        """This rank is the first of those in its model group that hold this part of ``name``."""
        return True

    def copies(self, ranks: Ranks) -> list[tuple[Comm, Callable[[str], bool]]]:
        """Who holds one copy of the model, and of which parameters this rank's parts count in it.

        Several groups where some parameters are shared out among other ranks than the rest.
        """
        if ranks.experts is None:
            return [(ranks.model, self.first_holder)]
        rest: Callable[[str], bool] = lambda n: not is_expert(n) and self.first_holder(n)  # noqa: E731
        return [(ranks.model, rest), (ranks.experts.model, is_expert)]

    def sharded(
        self, shard: Shard, model: nn.Module, data: Comm, *, whole_matrices: bool
    ) -> ShardedModel:
        """What sums the gradients of ``model`` over replicas, and divides what ``shard`` does."""
        return shard.apply(model, data, whole_matrices=whole_matrices)

    def boxes(self, name: str, part: LocalParameter) -> list[LocalParameter]:
        """A parameter's part, as the boxes of the whole one that it is."""
        return [part]


class SplitPart(WholePart):
    """The cells of one rank.

    Attributes:
        local: the cells' layers; their parameters are empty until :meth:`fill`.
        stages: stage -> what computes it.
    """

    def __init__(
        self,
        job: TrainJob,
        config: ModelConfig,
        schedule: Schedule,
        ranks: Ranks,
        *,
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        super().__init__()
        self._schedule, self._ranks, self._device = schedule, ranks, device
        place, parallel = schedule.place, job.parallel
        layers = cells_for(
            config.shape(), schedule, vocab_split=parallel.vocab_split, given=parallel.stages
        )
        cells = {
            stage: cell
            for stage, cell in enumerate(schedule.cell_of)
            if place[stage] == ranks.pp.rank
        }
        self.local = LocalModel(
            config,
            {cell: layers[cell] for cell in cells.values()},
            num_stages=len(layers),
            parallel=parallel,
            ranks=ranks,
            mixed=job.batching is not None,
            **options,
        )
        self.stages = {stage: self.local.stages[cell] for stage, cell in cells.items()}
        self.slices = dict(self.local.slices)
        if schedule.vocab_barriers:
            compute = torch.bfloat16 if job.precision == "bf16" else dtype
            self.vocab = self._vocabulary(config, compute)
        self._partial = frozenset(n for n, s in self.slices.items() if s.partial)
        self._copies: frozenset[str] = frozenset()
        self._tied: Comm | None = None
        self._replicas: Comm | None = None
        self._cell: dict[str, int] = {}
        self._shares: list[float] = []
        ends = sorted({place[0], place[-1]} if not schedule.cells else {0})
        if config.tied and not schedule.vocab_barriers and len(ends) == 2:
            # Both ends of the pipeline hold the embedding; their gradients are one sum.
            others = [r for r in range(ranks.pp.world) if r not in ends]
            tied = ranks.pp.split([ends, *([r] for r in others)])
            if ranks.pp.rank in ends:
                self._tied = tied
                if ranks.pp.rank == place[-1]:
                    self._copies = frozenset({"embed.weight"})
        if schedule.cells:
            self._share_replicas(layers)

    def _vocabulary(self, config: ModelConfig, compute: torch.dtype) -> VocabShard:
        """This rank's shard of embedding and output layer, as part of the local model."""
        shard = VocabShard(
            config, self._ranks.pp, self._schedule, dtype=compute, device=self._device
        )
        shape = (config.vocab_size, config.hidden)
        box = Box((shard.rows.start, 0), (len(shard.rows), config.hidden))
        for name in ("embed", "output"):
            table = getattr(shard, name)
            if table is not None:
                setattr(self.local, name, table)
                self.slices[f"{name}.weight"] = Slices(shape, (box,), replicated=True)
        return shard

    def _share_replicas(self, layers: Sequence[range]) -> None:
        """Find the ranks that hold the same stage, and the cell of every block."""
        held: dict[frozenset[int], list[int]] = {}
        pairs = list(zip(self._schedule.place, self._schedule.cell_of, strict=True))
        for rank in range(self._ranks.pp.world):
            held.setdefault(frozenset(c for r, c in pairs if r == rank), []).append(rank)
        self._replicas = self._ranks.pp.split(list(held.values()))
        if self._replicas.rank:
            self._copies = frozenset(self.slices)
        self._cell = {f"blocks.{n}.": cell for cell, blocks in enumerate(layers) for n in blocks}

    def fill(self, weights: WeightSource, dtype: torch.dtype) -> None:
        """Give every parameter its value, on the device."""
        for name in self.slices:
            owner, _, leaf = name.rpartition(".")
            value = self.value(name, weights).to(self._device, dtype)
            setattr(self.local.get_submodule(owner), leaf, nn.Parameter(value))

    def begin(self, batches: Sequence[MicroBatch], count: float) -> None:
        """Where micro-batches skip cells, count the tokens that visit each."""
        if not self._schedule.cells:
            return
        visited = torch.zeros(self._schedule.num_cells, dtype=torch.float64, device=self._device)
        for mb, batch in enumerate(batches):
            tokens = (batch.targets != -100).sum()
            for stage in self._schedule.route(mb):
                visited[self._schedule.cell_of[stage]] += tokens
        self._ranks.data.all_reduce(visited, tag="count").wait()
        self._shares = (count / visited.clamp(min=1.0)).tolist()

    def sum_gradients(self, lent: Lent) -> None:
        """Every rank sums what it has, so that all of them see the same norm."""
        with lent(self._partial | ({"embed.weight"} if self._tied is not None else set())) as here:
            self._sum_shares({n: here[n] for n in sorted(self._partial & here.keys())})
            if self._tied is not None and "embed.weight" in here:
                sum_together([here["embed.weight"]], self._tied)
            if self._replicas is None:
                return
            sum_together([here[n] for n in sorted(here)], self._replicas)
            for name, parameter in here.items():
                # A block's gradient is the mean over the tokens that visited it.
                cell = self._cell.get(".".join(name.split(".", 2)[:2]) + ".")
                if cell is not None and parameter.grad is not None:
                    parameter.grad.mul_(self._shares[cell])

    def _sum_shares(self, partial: Mapping[str, Tensor]) -> None:
        """Sum gradients of which each tensor-parallel rank has a share."""
        sum_together(list(partial.values()), self._ranks.tp)

    def first_holder(self, name: str) -> bool:
        """See the whole part."""
        if name in self._copies:
            return False
        return not self.slices[name].replicated or self._ranks.tp.rank == 0

    def boxes(self, name: str, part: LocalParameter) -> list[LocalParameter]:
        """See the whole part."""
        whole = self.slices[name]
        mine = Box(part.offset, tuple(part.tensor.shape))
        return [
            LocalParameter(part.tensor[here.slices(mine)], box.offset, whole.shape)
            for here, box in whole.find(mine)
        ]


def sum_together(parameters: Sequence[Tensor], comm: Comm) -> None:
    """All-reduce gradients in one message."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if comm.world == 1 or not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    comm.all_reduce(flat, tag="gradients").wait()
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
