"""Blocks with degrees of their own: each group of blocks shares out a stage's ranks in its own way.

The ranks of a stage hold a micro-batch as a grid: dp shares of its sequences, each of them on tp
ranks. Between blocks with other grids every rank is sent the sequences that it lacks. A rank that
holds a sequence holds the whole gradient of its activations, so the backward pass of a change is
the change back. Embedding, output layer and what stages hand on are in the job's own grid.

Shapes: b sequences of a rank, T tokens of each, D hidden.

Source: Miao et al., Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic
Parallelism, 2023, section 3.3 (slice and gather between layers).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.core.parts import table
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.pipeline.part import SplitPart, sum_together
from shoal.parallel.pipeline.stage import Stage
from shoal.parallel.shard.several import SeveralModels, sharded_part
from shoal.parallel.tensor.block import SplitBlock
from shoal.parallel.tensor.slices import slices

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.ir import Parallel, TrainJob
    from shoal.ir.schedule import Schedule
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm, MicroBatch, Ranks, Shard, ShardedModel

# Under this tag the meter counts what changes of grid send.
TAG = "layers"


class LayerGrid(NamedTuple):
    """How the ranks of a stage hold a micro-batch.

    Args:
        dp: shares of its sequences.
        tp: ranks, one after the other, that hold the same share.
    """

    dp: int
    tp: int

    def share(self, rank: int, sequences: int) -> range:
        """The sequences that a rank holds, of all of the micro-batch."""
        at = rank // self.tp
        return range(sequences * at // self.dp, sequences * (at + 1) // self.dp)

    def sources(self, wanted: range, rank: int, sequences: int) -> dict[int, range]:
        """Rank -> what of ``wanted`` it sends to ``rank``; a rank takes what it can from itself."""
        result = {}
        for at in range(self.dp):
            holder = at * self.tp + rank % self.tp
            source = rank if rank // self.tp == at else holder
            own = self.share(source, sequences)
            common = range(max(own.start, wanted.start), min(own.stop, wanted.stop))
            if common:
                result[source] = common
        return result


class GridChange(NamedTuple):
    """A micro-batch goes from one grid to another.

    Args:
        before: the grid that it comes from.
        after: the grid that it goes to.
        sequences: of the micro-batch, on all ranks of the stage.
        length: tokens of a sequence T.
        comm: the ranks of the stage.
    """

    before: LayerGrid
    after: LayerGrid
    sequences: int
    length: int
    comm: Comm

    def back(self) -> GridChange:
        """The other way round."""
        return self._replace(before=self.after, after=self.before)

    def move(self, x: Tensor) -> Tensor:
        """Tokens [b T, ...] of the grid before to those of the grid after, a new tensor."""
        comm, total = self.comm, self.sequences
        takes = [
            self.before.sources(self.after.share(rank, total), rank, total)
            for rank in range(comm.world)
        ]
        start = self.before.share(comm.rank, total).start

        def cut(rows: range) -> Tensor:
            return x[(rows.start - start) * self.length : (rows.stop - start) * self.length]

        mine = takes[comm.rank]
        if all(set(sources) <= {rank} for rank, sources in enumerate(takes)):
            # Every rank has what it needs already.
            return cut(mine.get(comm.rank, range(start, start))).clone()
        nothing = range(start, start)
        xs = [cut(sources.get(comm.rank, nothing)) for sources in takes]
        outs = [
            x.new_empty(len(mine.get(source, ())) * self.length, *x.shape[1:])
            for source in range(comm.world)
        ]
        comm.all_to_all(outs, xs, tag=TAG).wait()
        # By number of the source, which is the order of the sequences.
        return torch.cat(outs)


class _Changed(torch.autograd.Function):
    """A change of grid, and on the way back the change back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: GridChange) -> Tensor:
        ctx.change = change
        return change.move(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change.back().move(grad.contiguous()), None


class _Layer(NamedTuple):
    """How one block runs: communicators of its degrees, grid, and sharding."""

    parallel: Parallel
    ranks: Ranks
    shard: Choice

    @property
    def grid(self) -> LayerGrid:
        return LayerGrid(self.parallel.dp, self.parallel.tp)


class LayeredStage(Stage):
    """A stage with a different grid for each block.

    Args:
        how: of every block of the model.
        comm: the ranks of the stage.
        options: those of a plain stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        how: Mapping[int, _Layer],
        comm: Comm,
        parallel: Parallel,
        **options: Any,
    ) -> None:
        super().__init__(config, layers, parallel=parallel, **options | {"mixed": True})
        self._how, self._comm = how, comm
        self._grid = LayerGrid(parallel.dp, parallel.tp)
        for layer in layers:
            own = how[layer]
            if own.grid == self._grid:
                continue
            with torch.device("meta"):
                self.blocks[str(layer)] = SplitBlock(config, layer, own.ranks.tp, sp=False)
            prefix = f"blocks.{layer}."
            of_tp = slices(config, own.parallel, own.ranks.tp.rank)
            self.slices |= {name: of_tp[name] for name in self.slices if name.startswith(prefix)}

    def _through(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rest: tuple[Any, ...],
        mb: MicroBatch,
        recompute: bool,
    ) -> Tensor:
        """All blocks, each in its own grid."""
        length = len(cos)
        sequences = len(mb.tokens) * self._grid.dp
        given = {self._grid: rest}
        at = self._grid
        for layer in (*self.layers, None):
            grid = self._grid if layer is None else self._how[layer].grid
            if grid != at:
                change = GridChange(at, grid, sequences, length, self._comm)
                x = _Changed.apply(x, change)  # type: ignore[no-untyped-call]
                at = grid
            if layer is None:
                break
            if grid not in given:
                first = GridChange(self._grid, grid, sequences, length, self._comm)
                given[grid] = self._rest(first, rest, mb, x.dtype)
            x = self._block(layer, x, cos, sin, given[grid], recompute)
        return x

    def _rest(
        self, change: GridChange, rest: tuple[Any, ...], mb: MicroBatch, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        """What the blocks of another grid are given: attention, sequences, dropout."""
        _, _, drop = rest
        own = len(change.after.share(self._comm.rank, change.sequences))
        if mb.documents is not None:
            documents = change.move(mb.documents.reshape(-1)).view(own, -1)
            mb = mb._replace(documents=documents)
        if drop is not None:
            drop = drop.of(change.move(drop.tokens))
        return self._mix(mb, change.length, dtype), own, drop


class LayeredPart(SplitPart):
    """The cells of one rank, whose blocks have different degrees or sharding.

    Args:
        job: a job with ``layers``.
        options: those of a plain part.
    """

    def __init__(
        self, job: TrainJob, config: ModelConfig, schedule: Schedule, ranks: Ranks, **options: Any
    ) -> None:
        self._job_shard = job.shard
        made = {LayerGrid(job.parallel.dp, job.parallel.tp): (job.parallel, ranks)}
        self._how: dict[int, _Layer] = {}
        for group in job.layers:
            dp, tp, _ = job.degrees(group)
            if LayerGrid(dp, tp) not in made:
                parallel = job.parallel.model_copy(update={"dp": dp, "tp": tp})
                made[LayerGrid(dp, tp)] = parallel, ranks_of(ranks.world, parallel)
            for _ in range(group.blocks):
                own = _Layer(*made[LayerGrid(dp, tp)], group.shard or job.shard)
                self._how[len(self._how)] = own
        self._layouts = [own for _, own in made.values()]
        groups = job.parallel.attention().groups("dp", "cp", "tp")
        kind = functools.partial(LayeredStage, how=self._how, comm=ranks.world.split(groups))
        super().__init__(job, config, schedule, ranks, kind=kind, **options)

    def _of(self, name: str) -> tuple[Ranks, Choice]:
        """The ranks that share a parameter, and its sharding."""
        if not name.startswith("blocks."):
            return self._ranks, self._job_shard
        own = self._how[int(name.split(".")[1])]
        return own.ranks, own.shard

    def _sum_shares(self, partial: Mapping[str, Tensor]) -> None:
        for ranks in self._layouts:
            own = [x for name, x in partial.items() if self._of(name)[0] is ranks]
            sum_together(own, ranks.tp)

    def first_holder(self, name: str) -> bool:
        """See the whole part."""
        if name in self._copies:
            return False
        return not self.slices[name].replicated or self._of(name)[0].tp.rank == 0

    def copies(self, ranks: Ranks) -> list[tuple[Comm, Callable[[str], bool]]]:
        """One copy of the model for each way to share it out, of the parameters shared so."""

        def counts(own: Ranks) -> Callable[[str], bool]:
            return lambda name: self._of(name)[0] is own and self.first_holder(name)

        return [(own.model, counts(own)) for own in self._layouts]

    def sharded(
        self, shard: Shard, model: nn.Module, data: Comm, *, whole_matrices: bool
    ) -> ShardedModel:
        """Each parameter over the replicas of its own layout."""
        groups: list[tuple[Ranks, Choice]] = []
        for name, _ in model.named_parameters():
            if self._of(name) not in groups:
                groups.append(self._of(name))

        def of(group: tuple[Ranks, Choice]) -> Callable[[str], bool]:
            return lambda name: self._of(name) == group

        return SeveralModels(
            model,
            [
                sharded_part(
                    table("shard").build(group[1]),
                    model,
                    group[0].data,
                    of(group),
                    whole_matrices=whole_matrices,
                )
                for group in groups
            ],
        )
