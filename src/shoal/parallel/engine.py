"""One rank's part of a training step, whatever the split: model, gradients, norms, pieces.

Where nothing splits the model (tp = pp = cp = 1) it is the whole transformer and the
schedule a plain loop over micro-batches; elsewhere it is this rank's stages. Data
parallelism, sharded or not, goes on top through the same part of kind ``shard``.

Two rules make every split equal one process. Every rank back-propagates a *sum* of token
losses that is divided by the global count of counted tokens, and every reduction of
gradients is a sum. Every random number is a function of seed, step and place.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.boxes import Box
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Work
from shoal.ir.schedule import Schedule
from shoal.kernel.tensors import name_of
from shoal.model.dropout import Dropout
from shoal.model.initialise import empty
from shoal.model.routing import StepRouting
from shoal.model.trained import train_with
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.balance import Routers
from shoal.parallel.expert.fssdp import lending
from shoal.parallel.expert.gradients import slice_gradients
from shoal.parallel.expert.resharding import Resharding
from shoal.parallel.hdp.offload import host_share
from shoal.parallel.hdp.runtime import HybridRuntime
from shoal.parallel.pipeline.runtime import Boundary, Runtime, span_of
from shoal.parallel.pipeline.stages import HintedStage, WholeStage
from shoal.parallel.protocols import Held, MicroBatch
from shoal.parallel.shard.folded import FoldedModel, folded
from shoal.parallel.tensor.rows import Rows, Weights
from shoal.parallel.tensor.slices import Slices, is_expert

if TYPE_CHECKING:
    from shoal.ir import Machine, TrainJob
    from shoal.memory.activations.protocol import ActivationPolicy
    from shoal.memory.protocols import Offloaded
    from shoal.model.transformer import Transformer
    from shoal.parallel.expert.lent import Ledger
    from shoal.parallel.expert.resharding import Reshuffled
    from shoal.parallel.pipeline.stage import LocalModel
    from shoal.parallel.protocols import Comm, Ranks, Rounds, Sharded
    from shoal.parallel.vocab.passes import VocabShard

__all__ = ["Engine"]

_State: TypeAlias = Mapping[str, Mapping[str, Tensor]]


class Engine:
    """A model in training on one rank.

    Args:
        job: the job with every choice made; checked by :func:`~shoal.parallel.legal.check_split`.
        schedule: of one pipeline of the job.
        weights: what the model starts from.
        world: all ranks of the job.
        device: where this rank computes.
        dtype: of weights, and of computation where the job's precision is fp32.
        place: directory for what an offloaded run keeps on disk; the system's own for such if
            not given.
        cost: that sequences are dealt out by, where the job has ``batching``; that of counted
            operations alone, if not given.
        machine: that it runs on, by whose rates copies of experts are chosen.

    Attributes:
        offloaded: the model's state in tiers, which is ``sharded`` and updates itself; None
            where the job has no ``offload``.
        routers: of its experts, and how evenly they shared out the tokens of the last step.
        workers: groups of replicas that make updates of their own.
        outer: the rounds after which they agree; None where they do in every step.
        lent: what copies of experts cost this rank; None where there are none.
        hybrid: deals the sequences of every batch out; None where rows are dealt out evenly.
    """

    def __init__(
        self,
        job: TrainJob,
        schedule: Schedule,
        weights: Weights,
        world: Comm,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        place: Path | None = None,
        cost: SequenceCost | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.job = job
        self.config = weights.config
        self.schedule = schedule
        self.device = torch.device(device)
        self.dtype = dtype
        parallel = job.parallel
        sync = table("sync").build(job.sync)
        workers: int | None = sync.workers(parallel.dp)
        self.ranks: Ranks = ranks_of(world, parallel, workers)
        self.workers = workers or 1
        self.coord = parallel.attention().coord(world.rank)
        self.split = parallel.tp * parallel.cp * parallel.pp > 1 or parallel.folded
        self.split = self.split or job.batching is not None
        shard = table("shard").build(job.shard)
        optimizer = table("optimizer").build(job.optimizer)
        # A forward pass of a sharded model is itself collective: all ranks make the same ones.
        self.gathers = job.offload is not None or bool(shard.divides & {"gradients", "weights"})
        self.together = self.gathers or parallel.folded
        self.context = table("context").build(parallel.context) if parallel.cp > 1 else None
        dropout = Dropout(job.dropout, job.seed) if job.dropout else None
        sequences = job.global_batch // self.workers
        self._routing: StepRouting | None = None
        if self.config.num_experts:
            self._routing = StepRouting(job.seed, 0, 0, sequences)
        # Where the runtime is told the same of all blocks, none is named.
        self.recomputed = job.recomputed(self.config.num_layers) if job.layers else frozenset()
        self.vocab: VocabShard | None = None
        self.whole: Transformer | None = None
        self.local: nn.Module
        self._partial: frozenset[str] = frozenset()
        self._copies: frozenset[str] = frozenset()
        self._tied: Comm | None = None
        self._replicas: Comm | None = None
        self._cell: dict[str, int] = {}
        self._shares: list[float] = []
        self._slices: dict[str, Slices] = {}
        self._resharding: Resharding | None = None
        self.lent: Ledger | None = None
        stages: Mapping[int, Any] = {}
        if self.split:
            stages = self._build(weights, dropout)
        else:
            if job.offload is not None:
                self.whole = empty(self.config).to(dtype).train()
            else:
                self.whole = weights.model().to(self.device, dtype).train()
            # Fine-tuning may have made another architecture of it.
            own = {"architecture": self.whole.config.architecture}
            self.whole.config = self.config.model_copy(update=own)
            self.local = self.whole
        if job.kernel:
            train_with(
                self.local,
                self.config,
                job.kernel,
                "bf16" if job.precision == "bf16" else name_of(dtype),
                device="cuda" if self.device.type == "cuda" else "cpu",
                compiled=job.compile,
            )
        self.routers = Routers(self.local, self.config.num_layers, sequences)
        self.offloaded: Offloaded | None = None
        self.sharded: Sharded
        if job.offload is not None:
            self.sharded = self.offloaded = (
                table("offload")
                .build(job.offload)
                .apply(
                    self.local,
                    self.ranks.data,
                    optimizer,
                    place=place or Path(tempfile.gettempdir()),
                    device=self.device,
                    values=self._values(weights),
                )
            )
        elif self.ranks.experts is not None:
            self._resharding = Resharding(self.local, self.ranks.experts.ep)
            self.lent = lending(self.local, Work(shape=self.config.shape(), job=job), machine)
            self.sharded = both = folded(
                shard,
                self.local,
                self.ranks.data,
                self.ranks.experts.edp,
                whole_matrices=optimizer.whole_matrices,
            )
            if parallel.slices:
                layers = self.config.num_layers
                slice_gradients(self.local, both, parallel.slices, layers)
        else:
            self.sharded = shard.apply(
                self.local, self.ranks.data, whole_matrices=optimizer.whole_matrices
            )
        if self.whole is not None:  # now that its loss_sum is the sharded one
            # A step's number in what is compiled would be compiled anew in every step.
            routing = None if job.compile else self._routing
            whole = WholeStage(self.whole, job.compile, dropout, self.recomputed, routing)
            stages = {0: whole}
        # What keeps what is saved for backward passes; None where autograd does.
        self.saved: ActivationPolicy | None = (
            table("activation").build(job.activation).apply(self.local)
        )
        if self.saved is not None:
            stages = {number: HintedStage(stage, self.saved) for number, stage in stages.items()}
        self.outer: Rounds | None = None
        if self.ranks.outer is not None:
            self.outer = sync.apply(self.local, self.sharded.owned(), self.ranks.outer)
        compute = torch.bfloat16 if job.precision == "bf16" else dtype
        # Stages of a pipeline end their backward passes at different times.
        self.sharded.overlap = parallel.pp == 1 and job.batching is None
        self.runtime = Runtime(
            schedule,
            stages,
            self.ranks.pp,
            Boundary(
                self.config.hidden,
                compute,
                self.device,
                self.ranks.tp,
                sharded=parallel.sp,
                scatter=parallel.scatter_gather,
            ),
            vocab=self.vocab,
            autocast=self.autocast,
            around=lambda last: self.sharded.accumulate(last=last),
            recompute="none" if job.layers else job.recompute,
            span=span_of(world),
        )
        self.hybrid: HybridRuntime | None = None
        if job.batching is not None:
            cost = cost or SequenceCost.of(self.config.shape(), 1e12, [(world.world, 1e10)])
            assigner = table("assigner").build(job.batching)
            self.hybrid = HybridRuntime(
                assigner,
                cost,
                world,
                stages[0],
                around=lambda last: self.sharded.accumulate(last=last),
                autocast=self.autocast,
                recompute=job.recompute == "full" and not job.layers,
                host=host_share(assigner, cost, self.local, job.seq_len, world.world, self.device),
                span=span_of(world),
            )

    def _build(self, weights: Weights, dropout: Dropout | None) -> Mapping[int, Any]:
        """This rank's stages, their values, and what is shared with other ranks."""
        from shoal.parallel.pipeline.stage import LocalModel
        from shoal.parallel.tensor.slices import take
        from shoal.plan.partition import cells_for

        parallel, place = self.job.parallel, self.schedule.place
        layers = cells_for(
            self.config.shape(),
            self.schedule,
            vocab_split=parallel.vocab_split,
            given=parallel.stages,
        )
        cells = {
            stage: cell
            for stage, cell in enumerate(self.schedule.cell_of)
            if place[stage] == self.ranks.pp.rank
        }
        local = LocalModel(
            self.config,
            {cell: layers[cell] for cell in cells.values()},
            num_stages=len(layers),
            parallel=parallel,
            ranks=self.ranks,
            context=self.context,
            dropout=dropout,
            routing=self._routing,
            recomputed=self.recomputed,
            mixed=self.job.batching is not None,
        )
        self._slices = dict(local.slices)
        if self.schedule.vocab_barriers:
            self.vocab = self._vocabulary(local)
        if self.job.offload is not None:  # values go where they live, one by one
            for parameter in local.parameters():
                parameter.data = parameter.data.to(self.dtype)
        for name, whole in self._slices.items() if self.job.offload is None else ():
            owner, _, leaf = name.rpartition(".")
            value = take(weights.whole(name), whole).to(self.device, self.dtype)
            setattr(local.get_submodule(owner), leaf, nn.Parameter(value))
        local.train()
        self.local = local
        self._partial = frozenset(n for n, s in self._slices.items() if s.partial)
        ends = sorted({place[0], place[-1]} if not self.schedule.cells else {0})
        if self.config.tied and not self.schedule.vocab_barriers and len(ends) == 2:
            # Both ends of the pipeline hold the embedding; their gradients are one sum.
            others = [r for r in range(self.ranks.pp.world) if r not in ends]
            tied = self.ranks.pp.split([ends, *([r] for r in others)])
            if self.ranks.pp.rank in ends:
                self._tied = tied
                if self.ranks.pp.rank == place[-1]:
                    self._copies = frozenset({"embed.weight"})
        if self.schedule.cells:
            self._share_replicas(layers)
        return {stage: local.stages[cell] for stage, cell in cells.items()}

    def _values(self, weights: Weights) -> Callable[[str], Tensor]:
        """What this rank's model starts from, parameter by parameter."""
        from shoal.parallel.tensor.slices import take

        def value(name: str) -> Tensor:
            whole = weights.whole(name)
            return take(whole, self._slices[name]) if name in self._slices else whole

        return value

    def _passes(self, name: str, *inputs: Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Around all passes of a step, or those that score."""
        if self.offloaded is None:
            return contextlib.nullcontext()
        return self.offloaded.passes(name, *inputs)

    def _share_replicas(self, layers: Sequence[range]) -> None:
        """Find the ranks that hold the same stage, and the cell of every block."""
        held: dict[frozenset[int], list[int]] = {}
        pairs = list(zip(self.schedule.place, self.schedule.cell_of, strict=True))
        for rank in range(self.ranks.pp.world):
            held.setdefault(frozenset(c for r, c in pairs if r == rank), []).append(rank)
        self._replicas = self.ranks.pp.split(list(held.values()))
        if self._replicas.rank:
            self._copies = frozenset(self._slices)
        self._cell = {f"blocks.{n}.": cell for cell, blocks in enumerate(layers) for n in blocks}

    def _visitors(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Counted tokens that visit each cell, in all replicas of the pipeline."""
        visited = torch.zeros(self.schedule.num_cells, dtype=torch.float64, device=self.device)
        for mb, batch in enumerate(batches):
            tokens = (batch.targets != -100).sum()
            for stage in self.schedule.route(mb):
                visited[self.schedule.cell_of[stage]] += tokens
        self.ranks.data.all_reduce(visited, tag="count").wait()
        return visited.clamp(min=1.0)

    def _vocabulary(self, local: LocalModel) -> VocabShard:
        """This rank's shard of embedding and output layer, as part of the local model."""
        from shoal.parallel.vocab.passes import VocabShard

        compute = torch.bfloat16 if self.job.precision == "bf16" else self.dtype
        shard = VocabShard(
            self.config, self.ranks.pp, self.schedule, dtype=compute, device=self.device
        )
        shape = (self.config.vocab_size, self.config.hidden)
        box = Box((shard.rows.start, 0), (len(shard.rows), self.config.hidden))
        for name in ("embed", "output"):
            table = getattr(shard, name)
            if table is not None:
                setattr(local, name, table)
                self._slices[f"{name}.weight"] = Slices(shape, (box,), replicated=True)
        return shard

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in bf16 if the job says so; weights and updates keep their dtype."""
        if self.job.precision == "bf16":
            # What is cast is not kept where parameters come and go.
            keep = self.job.offload is None
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=keep)
        return contextlib.nullcontext()

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, which have rows of their own."""
        return self.job.parallel.dp

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.coord["dp"]

    @property
    def reads(self) -> tuple[int, int]:
        """Which part of a batch's rows this rank is given, of how many."""
        return (self.replica, self.replicas) if self.hybrid is None else (0, 1)

    @property
    def first_of_replica(self) -> bool:
        """This rank is the first of those that share their rows."""
        return not any(self.coord[axis] for axis in ("tp", "cp", "pp"))

    @property
    def counts(self) -> bool:
        """This rank's loss is part of the global sum: it is the first of those that have it."""
        return self.ranks.tp.rank == 0

    def positions(self, length: int) -> Tensor:
        """Places in the sequence that this rank holds, int64 [T / cp]."""
        if self.context is None:
            return torch.arange(length, device=self.device)
        shares = self.context.positions(length, self.ranks.cp.world)
        found: np.ndarray = shares[self.ranks.cp.rank]
        return torch.from_numpy(found).to(self.device)

    def microbatches(self, rows: Rows, size: int) -> list[MicroBatch]:
        """Micro-batches of ``size`` sequences, the last one smaller if they do not fill it."""
        positions = self.positions(rows.inputs.shape[1])
        whole = self.context is None
        inputs = rows.inputs if whole else rows.inputs[:, positions]
        targets = rows.targets if whole else rows.targets[:, positions]
        found = []
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            documents = None if rows.documents is None else rows.documents[part]
            found.append(
                MicroBatch(
                    inputs[part],
                    targets[part],
                    positions,
                    documents,
                    rows.first + start,
                    rows.step,
                    None if rows.weights is None else rows.weights[part],
                )
            )
        return found

    def backward(self, rows: Rows, size: int, count: float, *, record: bool = False) -> Tensor:
        """Forward and backward passes of one step; gradients are whole sums afterwards.

        Args:
            rows: of this rank's replica; of all, where sequences are dealt out.
            size: sequences of a micro-batch.
            count: counted tokens of the worker's batch, which is the global one.
            record: keep the times of the passes.

        Returns:
            What this rank adds to the global sum of token losses.
        """
        if self.hybrid is not None:
            return self.hybrid.step(rows, 1.0 / count)
        batches = self.microbatches(rows, size)
        if self.schedule.cells:
            self._shares = (count / self._visitors(batches)).tolist()
            with self.sharded.accumulate(last=False):
                pass  # a rank that no micro-batch visits has zeros to add
        keeping = contextlib.nullcontext() if self.saved is None else self.saved.step()
        with self._passes("train", *self._copied(batches)), keeping:
            loss = self.runtime.step(batches, 1.0 / count, record=record)
        return loss if self.counts else torch.zeros_like(loss)

    def finish(self) -> None:
        """Sum the gradients over all ranks that hold the same parameter."""
        self.sharded.finish()
        self.routers.gather(self.ranks.worker or self.ranks.world, self.config.num_experts)
        if not self.split:
            return
        # Every rank sums what it has, so that all of them see the same norm.
        if self.offloaded is not None:
            shared = self._partial | ({"embed.weight"} if self._tied is not None else set())
            here = self.offloaded.lend(shared)
        else:
            here = self.sharded.owned() if self.gathers else dict(self.local.named_parameters())
        self._sum([here[n] for n in sorted(self._partial & here.keys())], self.ranks.tp)
        if self._tied is not None and "embed.weight" in here:
            self._sum([here["embed.weight"]], self._tied)
        if self._replicas is not None:
            self._sum([here[n] for n in sorted(here)], self._replicas)
            for name, parameter in here.items():
                # A block's gradient is the mean over the tokens that visited it.
                cell = self._cell.get(".".join(name.split(".", 2)[:2]) + ".")
                if cell is not None and parameter.grad is not None:
                    parameter.grad.mul_(self._shares[cell])
        if self.offloaded is not None:
            self.offloaded.take_back(here)

    def sent_gradients(self) -> tuple[int, int] | None:
        """Bytes that travelled in the last step's backward passes, and after; None unless sliced.

        Of all gradients that this rank sums with others.
        """
        if isinstance(self.sharded, FoldedModel) and self.job.parallel.slices:
            return self.sharded.sent
        return None

    def reshard(self, step: int, updater: Callable[[], _State]) -> Reshuffled | None:
        """After the update and before it is published: experts may get other owners.

        Args:
            step: whose update was made.
            updater: tells what the optimizer keeps of each parameter, by name.

        Returns:
            What moved; None where no owners were chosen.
        """
        resharding = self._resharding
        if resharding is None or not resharding.due(step):
            return None
        found = resharding.reshard(self.sharded.owned(), updater())
        for prefix, owner_E in found.owners.items():
            mine = np.flatnonzero(owner_E == resharding.rank).tolist()
            for name, whole in self._slices.items():
                if name.startswith(prefix) and is_expert(name):
                    self._slices[name] = whole.of_rows(mine)
        return found

    @staticmethod
    def _sum(parameters: list[Tensor], comm: Comm) -> None:
        """All-reduce gradients in one message."""
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        if comm.world == 1 or not gradients:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        comm.all_reduce(flat, tag="gradients").wait()
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def grad_norm(self) -> Tensor:
        """Global L2 norm of all gradients; every logical parameter counts once."""
        experts = self.ranks.experts
        if experts is None:
            squares = self.sharded.squared_norm(self._first_holder)
            if self.split:
                self.ranks.model.all_reduce(squares, tag="norm").wait()
            return squares.sqrt()
        squares = self.sharded.squared_norm(lambda n: not is_expert(n) and self._first_holder(n))
        self.ranks.model.all_reduce(squares, tag="norm").wait()
        of_experts = self.sharded.squared_norm(is_expert)
        experts.model.all_reduce(of_experts, tag="norm").wait()
        return (squares + of_experts).sqrt()

    def _first_holder(self, name: str) -> bool:
        """This rank is the first of those in its model group that hold this part of ``name``."""
        if name in self._copies:
            return False
        return not self.split or not self._slices[name].replicated or self.ranks.tp.rank == 0

    def held(self) -> dict[str, list[Held]]:
        """Parameter name -> boxes of the whole parameter that this rank holds."""
        found: dict[str, list[Held]] = {}
        parts = self.sharded.held()
        for name, kept in self.routers.kept.items():  # no gradient reaches them
            parts[name] = Held(kept.detach(), (0,) * kept.dim(), tuple(kept.shape))
        for name, part in parts.items():
            found.setdefault(self.saved_as(name), []).extend(self._boxes(name, part))
        return found

    def saved_as(self, name: str) -> str:
        """The parameter as a part of which this one is saved: itself, if it is no tile."""
        tiles = {} if self.offloaded is None else self.offloaded.tiles
        return tiles[name].whole if name in tiles else name

    def boxes(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Held]]:
        """The same of tensors that are split as the parameters: gradients, optimizer state."""
        held = self.sharded.held()
        return {n: self._boxes(n, held[n]._replace(tensor=t)) for n, t in tensors.items()}

    def _boxes(self, name: str, part: Held) -> list[Held]:
        if not self.split:
            return [part]
        whole = self._slices[name]
        mine = Box(part.offset, tuple(part.tensor.shape))
        return [
            Held(part.tensor[here.slices(mine)], box.offset, whole.shape)
            for here, box in whole.find(mine)
        ]

    def writes(self, name: str) -> bool:
        """Whether this rank saves its boxes of ``name``."""
        if name in self.routers.kept:
            return self.ranks.data.rank == 0 and self._first_holder(name)
        return self.sharded.writes(name) and self._first_holder(name)

    @torch.no_grad()
    def loss_sum(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Loss sum of any sequences [b, T], forward only: what this rank adds to it."""
        parallel = self.job.parallel
        if not self.split:
            with self._passes("score", inputs, targets), self.autocast():
                assert self.whole is not None
                return self.whole.loss_sum(inputs, targets, weights_B=weights)
        multiple = 2 * parallel.cp * parallel.tp
        missing = -inputs.shape[1] % multiple
        if missing:  # what follows a token never changes it
            inputs = torch.nn.functional.pad(inputs, (0, missing))
            targets = torch.nn.functional.pad(targets, (0, missing), value=-100)
        rows = Rows(inputs, targets, None, 0, 0)
        batches = self.microbatches(rows, len(inputs))
        with self._passes("score", inputs, targets, *self._copied(batches)):
            loss = self.runtime.forward(batches)
        return loss if self.counts else torch.zeros_like(loss)

    @staticmethod
    def _copied(batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Everything of micro-batches that may be memory of its own."""
        return [x for mb in batches for x in (mb.tokens, mb.targets, mb.documents, mb.positions)]

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.local.train(mode)


def _local(tensor: Tensor) -> Tensor:
    """The rank's part of a tensor that may be distributed."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
