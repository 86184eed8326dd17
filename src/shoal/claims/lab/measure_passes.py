"""What the passes of a schedule cost on this machine: real passes of real stages, timed.

Every rank of a pipeline is built in this process, one beside the other, and does its own program
through the very runtime that trains; its peers are not there. What it sends is dropped, what it
receives is there at once, so a pass is timed without waiting for a peer. The cost of sending is
measured apart, between two processes.

The ranks take turns, step by step, so that a machine that becomes slower meanwhile does so for
all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import RankError, require
from shoal.core.meter import Meter
from shoal.core.random import generator
from shoal.cost.pipeline.simulator import UniformLinks
from shoal.ir.schedule import Event, OpCosts
from shoal.kernel.threads import torch_threads
from shoal.parallel.comm.calls import check_partition, check_peer
from shoal.parallel.comm.processes import run_processes
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm, Pending

# What a rank receives from peers that are not there: nothing that slows arithmetic down.
_RECEIVED = 0.01


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


_DONE = _Done()


class SingleRankComm:
    """One rank of several whose peers are not there; a :class:`~shoal.parallel.protocols.Comm`.

    Sends and sums cost nothing, and receives give a constant at once: for timing what one rank
    computes, never for results.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.ranks = tuple(range(world))
        self.ranks_per_node: int | None = None
        self.device = "cpu"
        self.meter = Meter([])

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """This rank in its group, alone as well.

        Raises:
            RankError: some rank is in none of the groups, or in two.
        """
        group = next(g for g in check_partition(groups, self.world) if self.rank in g)
        return SingleRankComm(group.index(self.rank), len(group))

    def all_reduce(self, x: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum") -> Pending:
        """Leaves ``x`` as it is."""
        return _DONE

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Leaves ``x`` as it is."""
        return _DONE

    def reduce(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Leaves ``x`` as it is."""
        return _DONE

    def all_gather(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """Every rank has what this one has."""
        for part in out.chunk(self.world):
            part.copy_(x.detach())
        return _DONE

    def reduce_scatter(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """The sum is this rank's part."""
        out.copy_(x.detach().chunk(self.world)[self.rank])
        return _DONE

    def all_to_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor], *, tag: str) -> Pending:
        """Every rank sends a constant."""
        for out in outs:
            out.fill_(_RECEIVED)
        return _DONE

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        """Drops ``x``."""
        check_peer(target, self.rank, self.world)
        return _DONE

    def receive(self, out: Tensor, source: int, *, tag: str) -> Pending:
        """A constant is there at once."""
        check_peer(source, self.rank, self.world)
        out.fill_(_RECEIVED)
        return _DONE

    def barrier(self) -> None:
        """There is no peer to wait for."""


class PlaceholderWeights:
    """Weights that are made in no time, for runs that are timed; the same on every rank."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def whole(self, name: str) -> Tensor:
        """Some parameter: a thousand random numbers over and over; norms are ones."""
        from shoal.model.initialise import empty

        shape = dict(empty(self.config).named_parameters())[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        source = generator(0, purpose="cheap weights")
        few = torch.from_numpy(source.standard_normal(1021)).float() * 0.02
        count = shape.numel()
        return few.repeat(-(-count // len(few)))[:count].view(shape)

    def model(self) -> Transformer:
        """The whole model."""
        from shoal.model.transformer import Transformer

        model = Transformer(self.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.whole(name))
        return model


def batch(job: TrainJob, vocab_size: int) -> ReplicaSequences:
    """One global batch of random tokens, all of which count; of a job with dp = 1."""
    source = generator(job.seed, purpose="batch of a measurement")
    ids = torch.from_numpy(source.integers(0, vocab_size, (job.global_batch, job.seq_len + 1)))
    return ReplicaSequences(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, 0, 0)


class MeasuredPasses(NamedTuple):
    """Costs of the passes of one job by round, their medians over micro-batches; bytes by rank."""

    rounds: tuple[OpCosts, ...]
    parameter_bytes: tuple[int, ...]

    @property
    def median(self) -> OpCosts:
        """Median over the rounds, pass by pass."""
        kinds = self.rounds[0].seconds
        seconds = {
            kind: tuple(np.median([r.seconds[kind] for r in self.rounds], axis=0).tolist())
            for kind in kinds
        }
        return self.rounds[0].model_copy(update={"seconds": seconds})


def measure_passes(
    jobs: Sequence[TrainJob], config: ModelConfig, *, rounds: int = 5, warmup: int = 1
) -> list[MeasuredPasses]:
    """Time the passes of every rank of every job, in this process and with one thread.

    Args:
        jobs: of pipelines alone: dp = tp = cp = 1. Their batch gives the micro-batches that are
            timed, which may be fewer than those of the schedules that are simulated later.
        config: the model.
        rounds: timed steps of each rank.
        warmup: steps before.

    Raises:
        PlanError: a split that the model does not allow.
        RankError: a job that splits more than the pipeline.
    """
    require(rounds >= 1, "measure_passes.rounds", rounds, expected="at least 1")
    for job in jobs:
        require(
            job.parallel.world == job.parallel.pp,
            "measure_passes: dp * tp * cp",
            job.parallel.world // job.parallel.pp,
            expected="1; the passes of one pipeline are timed",
            error=RankError,
        )
    with torch_threads(1):
        engines = [
            [
                ParallelEngine(
                    job,
                    check_split(job, config.shape()),
                    PlaceholderWeights(config),
                    SingleRankComm(rank, job.parallel.pp),
                )
                for rank in range(job.parallel.pp)
            ]
            for job in jobs
        ]
        rows = [batch(job, config.vocab_size) for job in jobs]
        results: list[list[OpCosts]] = [[] for _ in jobs]
        for turn in range(-warmup, rounds):
            events: list[list[Event]] = [[] for _ in jobs]
            for at, job in enumerate(jobs):
                for engine in engines[at]:
                    _step(engine, job, rows[at])
                    events[at] += engine.runtime.events or []
            if turn >= 0:
                for at, job in enumerate(jobs):
                    nbytes = 4.0 * job.seq_len * (job.microbatch or 1) * config.hidden
                    results[at].append(pass_costs(events[at], boundary_bytes=nbytes))
        held = [
            tuple(sum(p.nbytes for p in engine.local.parameters()) for engine in pipeline)
            for pipeline in engines
        ]
    return [MeasuredPasses(tuple(costs), size) for costs, size in zip(results, held, strict=True)]


def _step(engine: ParallelEngine, job: TrainJob, rows: ReplicaSequences) -> None:
    for parameter in engine.local.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    size = job.microbatch or len(rows.inputs)
    engine.backward(rows, size, rows.targets.numel(), record=True)


def pass_costs(events: Sequence[Event], *, boundary_bytes: float = 0.0) -> OpCosts:
    """Costs from the passes of a run: the median over the micro-batches of each pass."""
    times: dict[str, dict[int, list[float]]] = {}
    for event in events:
        by_stage = times.setdefault(event.op.kind, {})
        by_stage.setdefault(event.op.stage, []).append(event.end - event.start)
    seconds = {
        kind: tuple(float(np.median(by_stage[stage])) for stage in sorted(by_stage))
        for kind, by_stage in times.items()
    }
    return OpCosts(seconds=seconds, boundary_bytes=boundary_bytes)


def measure_link(nbytes: int, *, repeats: int = 21) -> UniformLinks:
    """A link on which one message of ``nbytes`` takes what it does between two processes here."""
    times = run_processes(
        "shoal.claims.lab.measure_passes:send_times",
        2,
        {"nbytes": nbytes, "repeats": repeats},
    )
    return UniformLinks(bandwidth=nbytes / float(np.median(times[0])))


def send_times(comm: Any, *, nbytes: int, repeats: int) -> list[float]:
    """Seconds of one message from rank to rank: half of there and back; on both ranks."""
    data = torch.zeros(max(1, nbytes // 4))
    other = 1 - comm.rank
    times = []
    for turn in range(repeats + 3):
        comm.barrier()
        begin = time.perf_counter()
        for mine in (0, 1):
            if comm.rank == mine:
                comm.send(data, other, tag="probe").wait()
            else:
                comm.receive(data, other, tag="probe").wait()
        if turn >= 3:
            times.append((time.perf_counter() - begin) / 2)
    return times
