"""One rank's part of a training step, whatever the split: model, gradients, norms, pieces.

Where nothing splits the model (tp = pp = cp = 1) it is the whole transformer and the
schedule a plain loop over micro-batches; elsewhere it is this rank's stages. Data
parallelism, sharded or not, goes on top through the same part of kind ``shard``. Everything else
that a technique does during a step is a hook of :mod:`shoal.ir.hooks`.

Two rules make every split equal one process. Every rank back-propagates a *sum* of token
losses that is divided by the global count of counted tokens, and every reduction of
gradients is a sum. Every random number is a function of seed, step and place.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.hooks import Hooks
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Work
from shoal.ir.hooks import ORDER, StepHook, TrainStep
from shoal.ir.schedule import Schedule
from shoal.kernel.tensors import name_of
from shoal.memory.offload.hook import OffloadHook
from shoal.model.dropout import Dropout
from shoal.model.initialise import empty
from shoal.model.routing import StepRouting
from shoal.model.trained import train_with
from shoal.model.transformer import TransformerBlock
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.balance import Routers
from shoal.parallel.expert.fssdp import lending
from shoal.parallel.expert.gradients import GradientSlices
from shoal.parallel.expert.resharding import Resharding
from shoal.parallel.hdp.offload import host_share
from shoal.parallel.hdp.runtime import HybridRuntime
from shoal.parallel.pipeline.layered import LayeredPart
from shoal.parallel.pipeline.part import SplitPart, WholePart
from shoal.parallel.pipeline.runtime import Runtime, StageBoundary, span_of
from shoal.parallel.pipeline.stages import HintedStage, WholeStage
from shoal.parallel.protocols import LocalParameter, MicroBatch, Updater
from shoal.parallel.shard.folded import folded
from shoal.parallel.tensor.rows import ReplicaSequences, WeightSource

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.ir import Machine, TrainJob
    from shoal.memory.protocols import TieredModel
    from shoal.memory.streaming.tiling import Tile
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm, Ranks, ShardedModel


class NoUpdate:
    """The optimizer of a rank that owns no parameters."""

    def step(self, factor: float) -> None:
        """Nothing."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing."""


class ParallelEngine:
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
        cost: that sequences are assigned by, where the job has ``batching``; that of counted
            operations alone, if not given.
        machine: that it runs on, by whose rates copies of experts are chosen.

    Attributes:
        hooks: hooks of techniques, in order.
        part: what this rank has of the model.
        whole: the model, where it is all of it.
        local: the module of this rank's parameters.
        sharded: sums its gradients over replicas.
        workers: groups of replicas with separate updates.
        reads: which part of a batch's rows this rank is given, of how many; None where every rank
            is given all of them.
        prepare: completes rows; may be called ahead, in another thread.
    """

    def __init__(
        self,
        job: TrainJob,
        schedule: Schedule,
        weights: WeightSource,
        world: Comm,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        place: Path | None = None,
        cost: SequenceCost | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.job, self.schedule, self.dtype = job, schedule, dtype
        self.config = weights.config
        self.device = torch.device(device)
        self.hooks: Hooks[StepHook] = Hooks(ORDER)
        parallel = job.parallel
        sync = table("sync").build(job.sync)
        workers: int | None = sync.workers(parallel.dp)
        self.ranks: Ranks = ranks_of(world, parallel, workers)
        self.workers = workers or 1
        self.coord = parallel.attention().coord(world.rank)
        self.split = parallel.tp * parallel.cp * parallel.pp > 1 or parallel.folded
        self.split = self.split or job.batching is not None or job.layers_apart
        self.reads: tuple[int, int] | None = (self.replica, self.replicas)
        self.prepare: Callable[[ReplicaSequences], ReplicaSequences] = lambda rows: rows
        self.context = table("context").build(parallel.context) if parallel.cp > 1 else None
        dropout = Dropout(job.dropout, job.seed) if job.dropout else None
        sequences = job.global_batch // self.workers
        routing = StepRouting(job.seed, 0, 0, sequences) if self.config.num_experts else None
        # Where the runtime is given the same for all blocks, none is named.
        recomputed = job.recomputed(self.config.num_layers) if job.layers else frozenset()
        self.whole: Transformer | None = None
        self.local: nn.Module
        self.part: WholePart
        stages: Mapping[int, Any] = {}
        if self.split:
            kind = LayeredPart if job.layers_apart else SplitPart
            self.part = part = kind(
                job,
                self.config,
                schedule,
                self.ranks,
                device=self.device,
                dtype=dtype,
                context=self.context,
                dropout=dropout,
                routing=routing,
                recomputed=recomputed,
            )
            stages, self.local = part.stages, part.local.train()
            if job.offload is None:
                part.fill(weights, dtype)
            else:  # values go where they live, one by one
                for parameter in self.local.parameters():
                    parameter.data = parameter.data.to(dtype)
        else:
            self.part = WholePart()
            if job.offload is not None:
                self.whole = empty(self.config).to(dtype).train()
            else:
                self.whole = _placed(weights.model(), self.device, dtype).train()
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
        layers, experts = self.config.num_layers, self.config.num_experts
        if experts:
            self.hooks.add(Routers(self.local, layers, experts, sequences, self.ranks.peers))
        if job.recompute == "selective":
            for block in self.local.modules():
                if isinstance(block, TransformerBlock):
                    block.keeps_products = True
        self._tiles: Mapping[str, Tile] = {}
        self.sharded = self._sharded(weights, place, machine)
        if self.whole is not None:  # now that its loss_sum is the sharded one
            # A step's number in what is compiled would be compiled anew in every step.
            known = None if job.compile else routing
            stages = {0: WholeStage(self.whole, job.compile, dropout, recomputed, known)}
        saved = table("activation").build(job.activation).apply(self.local)
        if saved is not None:
            self.hooks.add(saved)
            stages = {number: HintedStage(stage, saved) for number, stage in stages.items()}
        if workers is not None:
            self.hooks.add(sync.apply(self.local, self.sharded.owned(), self.ranks))
        compute = torch.bfloat16 if job.precision == "bf16" else dtype
        # Stages of a pipeline end their backward passes at different times.
        self.sharded.overlap = parallel.pp == 1 and job.batching is None
        self.runtime = Runtime(
            schedule,
            stages,
            self.ranks.pp,
            StageBoundary(
                self.config.hidden,
                compute,
                self.device,
                self.ranks.tp,
                sharded=parallel.sp,
                scatter=parallel.scatter_gather,
            ),
            vocab=self.part.vocab,
            autocast=self.autocast,
            around=lambda last: self.sharded.accumulate(last=last),
            recompute="none" if job.layers else job.recompute,
            span=span_of(world),
        )
        self._compute = self._by_schedule
        if job.batching is not None:
            self._assign_sequences(job.batching, stages[0], cost)

    def _sharded(
        self, weights: WeightSource, place: Path | None, machine: Machine | None
    ) -> ShardedModel:
        """The part that sums gradients over replicas, around the local model."""
        job, ranks = self.job, self.ranks
        shard = table("shard").build(job.shard)
        optimizer = table("optimizer").build(job.optimizer)
        whole_matrices = optimizer.whole_matrices
        # A forward pass of a sharded model is itself collective: all ranks make the same ones.
        self.gathers = job.offload is not None or bool(shard.divides & {"gradients", "weights"})
        self.gathers = self.gathers and not job.layers_apart  # not of every parameter
        self.together = self.gathers or job.parallel.folded or job.base == "divided"
        self.together = self.together or job.layers_apart
        self._lent = self._parameters
        sharded_model: ShardedModel
        if job.offload is not None:
            offloaded: TieredModel = (
                table("offload")
                .build(job.offload)
                .apply(
                    self.local,
                    ranks.data,
                    optimizer,
                    place=place or Path(tempfile.gettempdir()),
                    device=self.device,
                    values=lambda name: self.part.value(name, weights),
                )
            )
            hook = OffloadHook(offloaded)
            self.hooks.add(hook)
            sharded_model, self._lent, self._tiles = offloaded, hook.lent, offloaded.tiles
        elif ranks.experts is not None:
            owned = lambda: self.sharded.owned()  # noqa: E731
            self.hooks.add(Resharding(self.local, ranks.experts.ep, self.part.slices, owned))
            ledger = lending(self.local, Work(shape=self.config.shape(), job=job), machine)
            if ledger is not None:
                self.hooks.add(ledger)
            sharded_model = folded(
                shard, self.local, ranks.data, ranks.experts.edp, whole_matrices=whole_matrices
            )
            if slices := job.parallel.slices:
                layers = self.config.num_layers
                self.hooks.add(GradientSlices(self.local, sharded_model, slices, layers))
        else:
            sharded_model = self.part.sharded(
                shard, self.local, ranks.data, whole_matrices=whole_matrices
            )
        return sharded_model

    def _assign_sequences(self, choice: Choice, stage: Any, cost: SequenceCost | None) -> None:
        """Compute steps by a plan of each batch, in the place of the schedule."""
        job, world = self.job, self.ranks.world
        cost = cost or SequenceCost.of(self.config.shape(), 1e12, [(world.world, 1e10)])
        assigner = table("assigner").build(choice)
        hybrid = HybridRuntime(
            assigner,
            cost,
            world,
            stage,
            around=lambda last: self.sharded.accumulate(last=last),
            autocast=self.autocast,
            recompute=job.recompute == "full" and not job.layers,
            host=host_share(assigner, cost, self.local, job.seq_len, world.world, self.device),
            span=span_of(world),
        )
        self.hooks.add(hybrid)
        self.reads, self.prepare = None, hybrid.prepare
        self._compute = lambda rows, size, count, record: hybrid.step(rows, 1.0 / count)

    def updater(self, optimizer: Any) -> Updater:
        """What updates this rank's parameters: a model in tiers does it itself."""
        if isinstance(self.sharded, Updater):
            return self.sharded
        owned = self.sharded.owned()
        part: Updater = optimizer.build(owned) if owned else NoUpdate()
        return part

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
        array: np.ndarray = shares[self.ranks.cp.rank]
        return torch.from_numpy(array).to(self.device)

    def microbatches(self, rows: ReplicaSequences, size: int) -> list[MicroBatch]:
        """Micro-batches of ``size`` sequences, the last one smaller if they do not fill it."""
        positions = self.positions(rows.inputs.shape[1])
        whole = self.context is None
        inputs = rows.inputs if whole else rows.inputs[:, positions]
        targets = rows.targets if whole else rows.targets[:, positions]
        microbatches = []
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            documents = None if rows.documents is None else rows.documents[part]
            microbatches.append(
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
        return microbatches

    def backward(
        self, rows: ReplicaSequences, size: int, count: float, *, record: bool = False
    ) -> Tensor:
        """Forward and backward passes of one step.

        Args:
            rows: of this rank's replica; of all, where ``reads`` is None.
            size: sequences of a micro-batch.
            count: counted tokens of the worker's batch, which is the global one.
            record: keep the times of the passes.

        Returns:
            What this rank adds to the global sum of token losses.
        """
        return self._compute(rows, size, count, record)

    def _by_schedule(self, rows: ReplicaSequences, size: int, count: float, record: bool) -> Tensor:
        batches = self.microbatches(rows, size)
        self.part.begin(batches, count)
        if self.schedule.cells:
            with self.sharded.accumulate(last=False):
                pass  # a rank that no micro-batch visits has zeros to add
        with self.around("train", *_copied(batches)):
            loss = self.runtime.step(batches, 1.0 / count, record=record)
        return loss if self.counts else torch.zeros_like(loss)

    @contextlib.contextmanager
    def around(self, what: str, *inputs: Tensor | None) -> Iterator[None]:
        """Around passes; see :meth:`~shoal.ir.hooks.StepHook.passes`."""
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.passes(what, *inputs))
            yield

    def finish(self) -> None:
        """Sum the gradients over all ranks that hold the same parameter."""
        self.sharded.finish()
        for hook in self.hooks:
            hook.finish()
        self.part.sum_gradients(self._lent)

    def publish(self, step: TrainStep) -> None:
        """After the update of what this rank owns: every rank sees every new parameter."""
        for hook in self.hooks:
            hook.after_update(step)
        self.sharded.publish()
        for hook in self.hooks:
            hook.published(step)

    def _parameters(
        self, names: Collection[str]
    ) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        """All parameters with gradients that are here; ``names`` are those that must be."""
        return contextlib.nullcontext(
            self.sharded.owned() if self.gathers else dict(self.local.named_parameters())
        )

    def grad_norm(self) -> Tensor:
        """Global L2 norm of all gradients; every logical parameter counts once."""
        sums = []
        for comm, counts in self.part.copies(self.ranks):
            sums.append(self.sharded.squared_norm(counts))
            comm.all_reduce(sums[-1], tag="norm").wait()
        first, *rest = sums
        return sum(rest, first).sqrt()

    def _kept(self) -> dict[str, Tensor]:
        """Parameters that no gradient reaches: a hook changes them."""
        return {name: kept for hook in self.hooks for name, kept in hook.kept.items()}

    def held(self) -> dict[str, list[LocalParameter]]:
        """Parameter name -> boxes of the whole parameter that this rank holds."""
        result: dict[str, list[LocalParameter]] = {}
        parts = self.sharded.held()
        for name, kept in self._kept().items():
            parts[name] = LocalParameter(kept.detach(), (0,) * kept.dim(), tuple(kept.shape))
        for name, part in parts.items():
            result.setdefault(self.saved_as(name), []).extend(self.part.boxes(name, part))
        return result

    def saved_as(self, name: str) -> str:
        """The parameter as a part of which this one is saved: itself, if it is no tile."""
        return self._tiles[name].whole if name in self._tiles else name

    def boxes(self, tensors: Mapping[str, Tensor]) -> dict[str, list[LocalParameter]]:
        """The same of tensors that are split as the parameters: gradients, optimizer state."""
        held = self.sharded.held()
        return {n: self.part.boxes(n, held[n]._replace(tensor=t)) for n, t in tensors.items()}

    def writes(self, name: str) -> bool:
        """Whether this rank saves its boxes of ``name``."""
        mine = self.ranks.data.rank == 0 if name in self._kept() else self.sharded.writes(name)
        return mine and self.part.first_holder(name)

    @torch.no_grad()
    def loss_sum(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Loss sum of any sequences [b, T], forward only: what this rank adds to it."""
        parallel = self.job.parallel
        if self.whole is not None:
            with self.around("score", inputs, targets), self.autocast():
                return self.whole.loss_sum(inputs, targets, weights_B=weights)
        multiple = 2 * parallel.cp * parallel.tp
        missing = -inputs.shape[1] % multiple
        if missing:  # what follows a token never changes it
            inputs = torch.nn.functional.pad(inputs, (0, missing))
            targets = torch.nn.functional.pad(targets, (0, missing), value=-100)
        rows = ReplicaSequences(inputs, targets, None, 0, 0)
        batches = self.microbatches(rows, len(inputs))
        with self.around("score", inputs, targets, *_copied(batches)):
            loss = self.runtime.forward(batches)
        return loss if self.counts else torch.zeros_like(loss)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.local.train(mode)


def _placed(model: Transformer, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model on a device, its fp32 weights in ``dtype``; what lies in fewer bits stays so."""
    for x in (*model.parameters(), *model.buffers()):
        x.data = x.data.to(device, dtype if x.dtype == torch.float32 else x.dtype)
    return model


def _copied(batches: Sequence[MicroBatch]) -> list[Tensor | None]:
    """Everything of micro-batches that may be memory of its own."""
    return [x for mb in batches for x in (mb.tokens, mb.targets, mb.documents, mb.positions)]
