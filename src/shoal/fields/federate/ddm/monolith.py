"""One model of all the data, by one process or by ranks that sum their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.federate.ddm.islands import train_islands
from shoal.fields.federate.ddm.protocols import (
    FlowEstimate,
    FlowRun,
    FlowWork,
    NetworkTask,
    TrainedFlow,
)
from shoal.fields.federate.protocols import FederationError
from shoal.ir import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.ir.comm import Comm

_START_S = 3.0
# Seconds of an all-reduce whatever its size, and byte/s of it through shared memory.
_REDUCE_S, _REDUCE_RATE = 2e-4, 1e9


@part
class Monolith:
    """Train one model on all the data: what experts are compared with.

    Args:
        ranks: processes, each with a share of the batch, that sum their gradients in every step.
    """

    ranks: Annotated[int, Ge(1)] = 1

    @classmethod
    def candidates(cls, work: FlowWork, machine: Machine) -> Iterator[Self]:
        """One process, and one for each of up to eight cores."""
        cores = machine.device.num_cores or 1
        for ranks in (1, 2, 4, 8):
            if ranks <= cores and work.batch % ranks == 0:
                yield cls(ranks=ranks)

    def estimate(self, work: FlowWork, machine: Machine) -> FlowEstimate:
        """Steps, and the sums of gradients in a ring."""
        self._check(work.batch)
        cores = max(machine.device.num_cores or 1, 1)
        size = 4.0 * work.shape.parameters
        waves = -(-self.ranks // cores)
        seconds = waves * work.train_s(work.shape, work.steps, work.batch // self.ranks)
        sent = 2 * size * (self.ranks - 1) * work.steps
        if self.ranks > 1:
            seconds += work.steps * (_REDUCE_S + 2 * size / _REDUCE_RATE)
        return FlowEstimate(
            train_s=seconds + _START_S,
            processes=self.ranks,
            network_bytes=sent,
            experts=1,
            ranks=self.ranks,
            why=f"one model of {work.samples} samples on {self.ranks} ranks",
        )

    def train(self, run: FlowRun) -> TrainedFlow:
        """One process, or ranks."""
        from shoal.fields.federate.ddm.training import write_shard

        self._check(run.task.batch)
        write_shard(run.directory / run.task.folder, run.data)
        sizes = [len(run.data.x)]
        if self.ranks == 1:
            failed = train_islands(run.directory, [run.task], 1, run.tick)
            return TrainedFlow(sizes=sizes, network_bytes=0.0, failed=failed)
        run.tick(0.0, f"one model on {self.ranks} ranks")
        sent = sum_over_ranks(run.directory, run.task, self.ranks)
        return TrainedFlow(sizes=sizes, network_bytes=sent, failed={})

    def _check(self, batch: int) -> None:
        if batch % self.ranks:
            raise FederationError(
                f"method.monolith.ranks: a batch of {batch} cannot be divided among {self.ranks} "
                "ranks; take a multiple"
            )


def sum_over_ranks(run: Path, task: NetworkTask, ranks: int) -> float:
    """Train a task on ranks; the bytes that all of them have sent."""
    from shoal.parallel.comm.processes import run_processes

    sent = run_processes(
        "shoal.fields.federate.ddm.monolith:train_rank",
        ranks,
        {"run": str(run), "task": task},
        timeout_s=24 * 3600.0,
        collective_s=300.0,
    )
    return float(sum(sent))


def train_rank(comm: Comm, run: str, task: NetworkTask) -> float:
    """One rank of a monolith; bytes that it has sent."""
    from shoal.fields.federate.ddm.training import NetworkTraining, read_shard, train_to_the_end

    directory = Path(run) / task.folder
    training: Any = NetworkTraining(task, read_shard(directory))

    def combine(gradient: Tensor) -> None:
        comm.all_reduce(gradient, tag="gradients").wait()
        gradient.div_(comm.world)

    before = _sent(comm)
    train_to_the_end(directory, training, lambda step, loss: None, combine, comm.rank, comm.world)
    comm.barrier()
    return _sent(comm) - before


def _sent(comm: Comm) -> float:
    totals = comm.meter.totals()
    return sum(number for name, number in totals.items() if name.startswith("wire_bytes"))
