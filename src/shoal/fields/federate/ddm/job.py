"""The values of a training of diffusion experts: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.federate.ddm.protocols import NoiseName
from shoal.ir import Job, Plan, Report


class TrainExpertsJob(Job):
    """Train a generative model as experts on clusters of the data, which never talk to each other.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: what the model learns to draw.
        method: experts or one model; None lets the planner choose.
        path: how samples become noise: ``linear`` (rectified flow) or ``cosine``.
        conditional: learn the labels too, so that one can be asked for.
        width: of the layers of a network.
        depth: residual layers of a network.
        steps: optimizer steps.
        batch: samples of a step; experts share it.
        lr: learning rate of Adam.
        ema: decay of the running mean of the weights.
        mixture: which experts work in a step of the sampler.
        samples: drawn at the end to be compared with the data.
        sample_steps: Euler's steps of the sampler.
        distill: steps in which one network learns from the ensemble afterwards; 0 for none.
        degrade: end with the experts that are there if an island fails; the run stops without.
        processes: that work at the same time; 0 for one on each core.
        seed: random seed.
    """

    job: Literal["train_experts"] = "train_experts"
    name: str = Field(default="experts", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: Annotated[Choice, Kind("example_source")] = Choice(name="digits")
    method: Annotated[Choice, Kind("flow_training")] | None = None
    path: NoiseName = "linear"
    conditional: bool = False
    width: PositiveInt = 192
    depth: PositiveInt = 3
    steps: PositiveInt = 3000
    batch: PositiveInt = 256
    lr: Annotated[float, Field(gt=0)] = 1e-3
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.999
    mixture: Annotated[Choice, Kind("expert_mixture")] = Choice(name="top1")
    samples: Annotated[int, Field(ge=64)] = 2000
    sample_steps: PositiveInt = 50
    distill: NonNegativeInt = 0
    degrade: bool = False
    processes: NonNegativeInt = 0
    seed: NonNegativeInt = 0


class TrainExpertsPlan(Plan[TrainExpertsJob]):
    """The plan of such a training: its job has a method.

    Args:
        parameters: of one network.
        samples: that there are to learn from.
    """

    parameters: int
    samples: int


class TrainExpertsReport(Report[TrainExpertsPlan]):
    """The report; its details have ``sizes`` of the clusters."""
