"""What training and mixing of diffusion experts promise; no torch.

The velocity of the whole data set at a noisy sample is the mean of the velocities of its clusters,
weighted by the probability that the sample comes from each. So a network for each cluster, trained
alone, and a classifier of noisy samples make up the model of the whole.

Source: McAllister et al., Decentralized Diffusion Models, 2025. Shapes: N samples, D numbers each,
K experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.ir import Machine

if TYPE_CHECKING:
    from torch import Tensor

NoiseName = Literal["linear", "cosine"]
"""Names of :data:`shoal.model.flow.PATHS`."""

# Inputs of the layer that reads the time.
_TIME = 32


class FlowShape(Value):
    """What fixes a network of :mod:`shoal.model.flow`.

    Args:
        features: numbers of a sample, D.
        outputs: D of an expert, K of a router.
        width: of its layers.
        depth: residual layers.
        classes: labels that it may be given; 0 for none.
        residual: the sample is a part of the output; of experts, whose outputs are its numbers.
    """

    features: PositiveInt
    outputs: PositiveInt
    width: PositiveInt
    depth: PositiveInt
    classes: NonNegativeInt = 0
    residual: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of the network."""
        w = self.width
        ends = (self.features + 1) * w + (w + 1) * self.outputs + (_TIME + 1) * w
        labels = w * (self.classes + 1) if self.classes else 0
        share = w + 1 if self.residual else 0
        return ends + self.depth * 4 * w * (w + 1) + labels + share

    @property
    def flops(self) -> float:
        """FLOPs of a training step for one sample, forward and backward."""
        return 6.0 * self.parameters


class NetworkTask(Value):
    """One network that a process trains alone.

    Args:
        role: ``expert`` learns the velocity, ``router`` the cluster of a noisy sample.
        number: of the expert; 0 of a router.
        experts: of the ensemble, K.
        shape: of the network.
        path: how samples become noise.
        steps: optimizer steps.
        batch: samples of a step.
        lr: learning rate of Adam, after a linear rise over 100 steps.
        ema: decay of the running mean of the weights that is kept.
        drop: share of the labels that are hidden, for guidance.
        seed: of its random choices.
    """

    role: Literal["expert", "router"]
    number: NonNegativeInt = 0
    experts: PositiveInt
    shape: FlowShape
    path: NoiseName
    steps: PositiveInt
    batch: PositiveInt
    lr: PositiveFloat
    ema: float
    drop: float = 0.1
    seed: int

    @property
    def folder(self) -> str:
        """Its directory in that of the run."""
        return f"islands/{self.number}" if self.role == "expert" else "router"


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowData:
    """What the experts learn from.

    Args:
        x: samples in -1 to 1, float32 [N, D].
        y: labels, int64 [N].
        classes: number of labels.
        cluster: of each sample, int64 [N], for a router; empty for an expert.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    cluster: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def rows(self, rows: np.ndarray) -> FlowData:
        """Some of the samples."""
        return FlowData(x=self.x[rows], y=self.y[rows], classes=self.classes)


@dataclass(frozen=True, kw_only=True)
class FlowWork:
    """What the planner knows of a training.

    Args:
        samples: training samples that there are, N.
        shape: of the network of an expert.
        steps: optimizer steps.
        batch: samples of a step, of all experts together.
        call_s: seconds of an optimizer step whatever its batch.
        row_s: seconds of each sample in a step.
    """

    samples: int
    shape: FlowShape
    steps: int
    batch: int
    call_s: float
    row_s: float

    def train_s(self, shape: FlowShape, steps: int, batch: int) -> float:
        """Seconds in which one process on one core trains a network."""
        factor = shape.parameters / self.shape.parameters
        return steps * (self.call_s + self.row_s * factor * batch)


@dataclass(frozen=True, kw_only=True)
class FlowEstimate:
    """What a way of training costs.

    Args:
        train_s: seconds.
        processes: that work at the same time.
        network_bytes: between processes in all.
        experts: of the ensemble.
        ranks: on which a monolith would sum gradients in their place.
        why: in a phrase.
    """

    train_s: float
    processes: int
    network_bytes: float
    experts: int
    ranks: int
    why: str


@dataclass(frozen=True, kw_only=True)
class TrainedFlow:
    """What a training has left in the directory of its run.

    Args:
        sizes: samples of each expert.
        network_bytes: sent between processes.
        failed: expert or ``router`` -> why it has ended early.
        imbalance: samples of the largest cluster over the mean, minus 1.
    """

    sizes: Sequence[int]
    network_bytes: float
    failed: dict[str, str]
    imbalance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """What a way of training is given.

    Args:
        directory: of the run; files of an earlier, stopped run are used again.
        data: to learn from.
        task: of an expert that has all the data and the whole batch.
        at_once: processes that may work at the same time.
        tick: called with the share done and what is being done.
    """

    directory: Path
    data: FlowData
    task: NetworkTask
    at_once: int
    tick: Callable[[float, str], None]


@runtime_checkable
class FlowTraining(Protocol):
    """How a budget of training samples becomes one or several networks."""

    @classmethod
    def candidates(cls, work: FlowWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here."""

    def estimate(self, work: FlowWork, machine: Machine) -> FlowEstimate:
        """What it costs.

        Raises:
            FederationError: the batch cannot be divided like that.
        """

    def train(self, run: FlowRun) -> TrainedFlow:
        """Train, in processes of its own.

        Raises:
            FederationError: a cluster would be empty, or the batch cannot be divided.
        """


@runtime_checkable
class ExpertMixture(Protocol):
    """Which experts work in a step, and with what weight."""

    def active(self, experts: int) -> int:
        """How many of them work for a sample."""

    def weights(self, probabilities: Tensor, draw: np.random.Generator) -> Tensor:
        """Weights [N, K] that sum to 1, from the router's probabilities [N, K]."""
