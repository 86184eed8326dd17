"""Diffusion experts: one network for each cluster, each trained alone, and a router.

Source: McAllister et al., Decentralized Diffusion Models, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.fields.federate.ddm.islands import train_islands
from shoal.fields.federate.ddm.partition import balanced_clusters
from shoal.fields.federate.ddm.protocols import (
    FlowData,
    FlowEstimate,
    FlowRun,
    FlowShape,
    FlowWork,
    NetworkTask,
    TrainedFlow,
)
from shoal.fields.federate.protocols import FederationError
from shoal.ir import Machine

# Samples of a cluster below which the planner proposes fewer.
_LEAST = 200
# Seconds in which a process imports torch and reads its shard.
_START_S = 3.0


@part
class DiffusionExperts:
    """Train an expert for each cluster, with a share of the batch, and a router for all.

    Args:
        k: experts; the batch is divided by it, so all take as many samples as one model would.
        fine: fine clusters from which those of the experts are made.
        tolerance: share by which a cluster may be larger than the mean.
        router_width: width of the router's layers; its depth is 2.
    """

    k: Annotated[int, Ge(1)] = 4
    fine: Annotated[int, Ge(1)] = 64
    tolerance: Annotated[float, Gt(0)] = 0.2
    router_width: Annotated[int, Ge(1)] = 64

    @classmethod
    def candidates(cls, work: FlowWork, machine: Machine) -> Iterator[Self]:
        """Two, four and eight, where clusters are large enough."""
        for k in (2, 4, 8):
            if work.batch % k == 0 and work.samples >= _LEAST * k:
                yield cls(k=k)

    def estimate(self, work: FlowWork, machine: Machine) -> FlowEstimate:
        """Experts in turn on the machine's cores; nothing is sent."""
        self._check(work.batch)
        cores = max(machine.device.num_cores or 1, 1)
        one = work.train_s(work.shape, work.steps, work.batch // self.k)
        router = work.train_s(self.router_shape(work.shape), work.steps, work.batch)
        tasks = [*[one + _START_S] * self.k, router + _START_S]
        at_once = min(len(tasks), cores)
        return FlowEstimate(
            train_s=max(sum(tasks) / at_once, max(tasks)),
            processes=at_once,
            network_bytes=0.0,
            experts=self.k,
            ranks=self.k,
            why=f"{self.k} experts of {work.samples // self.k} samples each, and a router",
        )

    def train(self, run: FlowRun) -> TrainedFlow:
        """Divide the data, and start a process for each expert and for the router."""
        self._check(run.task.batch)
        labels = balanced_clusters(
            run.data.x, self.k, fine=self.fine, tolerance=self.tolerance, seed=run.task.seed
        )
        sizes = np.bincount(labels, minlength=self.k)
        tasks = self.tasks(run.task)
        for task in tasks:
            self._give(run, task, labels)
        failed = train_islands(run.directory, tasks, run.at_once, run.tick)
        return TrainedFlow(
            sizes=sizes.tolist(),
            network_bytes=0.0,  # the processes refuse to open a socket
            failed=failed,
            imbalance=float(sizes.max() / sizes.mean() - 1),
        )

    def tasks(self, whole: NetworkTask) -> list[NetworkTask]:
        """What to train: the router, which has the whole batch, and the experts."""
        share = {"experts": self.k, "batch": whole.batch // self.k}
        experts = [whole.model_copy(update={**share, "number": at}) for at in range(self.k)]
        if self.k == 1:  # a router of one expert has nothing to learn
            return experts
        router = {"role": "router", "experts": self.k, "shape": self.router_shape(whole.shape)}
        return [whole.model_copy(update=router), *experts]

    def _give(self, run: FlowRun, task: NetworkTask, labels: np.ndarray) -> None:
        from shoal.fields.federate.ddm.training import write_shard

        data, directory = run.data, run.directory / task.folder
        if task.role == "router":
            data = FlowData(x=data.x, y=data.y, classes=data.classes, cluster=labels)
        else:
            data = data.rows(np.flatnonzero(labels == task.number))
        write_shard(directory, data)

    def router_shape(self, shape: FlowShape) -> FlowShape:
        """Of the router, beside experts of a shape."""
        update = {"outputs": self.k, "width": self.router_width, "depth": 2, "residual": False}
        return shape.model_copy(update=update)

    def _check(self, batch: int) -> None:
        if batch % self.k:
            raise FederationError(
                f"method.experts.k: a batch of {batch} cannot be divided among {self.k} experts; "
                "take a multiple"
            )
