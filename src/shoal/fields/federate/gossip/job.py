"""The values of a job without a server: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Kind
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.job import FederateJob
from shoal.ir import Job, Plan, Report


class GossipJob(Job):
    """Train on nodes that talk to their neighbours on a graph, without a server.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: what nodes learn from; what is held out tests them.
        partition: which node has which examples.
        learner: the model that each node trains.
        nodes: how many and what they are: ``8``, ``10xLaptop@20Mbit``, ``4@100Mbit+1@5Mbit``.
        topology: which nodes are neighbours.
        policy: what nodes send to each other, and what they do with it.
        same_start: all nodes begin with the same random model.
        steps: optimizer steps between messages.
        batch: examples of a step.
        lr: learning rate.
        momentum: of SGD.
        rounds: length of the run; of a policy with clocks of its own, units of time, in each of
            which a node computes one gradient on average.
        target: mean accuracy of the nodes at which the run ends; None to make all rounds.
        budget_s: seconds after which it ends in any case; None for no limit.
        clock: ``wall``: processes that talk over sockets; ``virtual``: one process in which time is
            computed.
        hosts: processes of a run on the wall clock; nodes are dealt to them. 0 for one each, up to
            16.
        seed: random seed.
    """

    job: Literal["gossip"] = "gossip"
    name: str = Field(default="gossip", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: Annotated[Choice, Kind("example_source")] = Choice(name="digits")
    partition: Annotated[Choice, Kind("partitioner")] = Choice(name="iid")
    learner: Annotated[Choice, Kind("learner")] = Choice(name="cnn_digits")
    nodes: str = "8"
    topology: Annotated[Choice, Kind("topology")] = Choice(name="ring_k")
    policy: Annotated[Choice, Kind("gossip_policy")] = Choice(name="variance_corrected")
    same_start: bool = False
    steps: PositiveInt = 20
    batch: PositiveInt = 32
    lr: PositiveFloat = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rounds: PositiveInt = 20
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    budget_s: PositiveFloat | None = None
    clock: Literal["wall", "virtual"] = "wall"
    hosts: NonNegativeInt = 0
    seed: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _number(cls, values: object) -> object:
        """A bare number of nodes is one."""
        if isinstance(values, dict) and isinstance(values.get("nodes"), int):
            return {**values, "nodes": str(values["nodes"])}
        return values

    @model_validator(mode="after")
    def _nodes_fit(self) -> GossipJob:
        try:
            count = len(parse_clients(self.nodes))
        except ConfigError as cause:
            raise ConfigError(str(cause).replace("clients", "nodes")) from cause
        if count < 2:
            raise ConfigError(f"nodes: {count}; without a server it takes at least two")
        return self

    def as_federate(self) -> FederateJob:
        """The job of the same learning with a server, as far as it is the same."""
        return FederateJob(
            data=self.data, partition=self.partition, learner=self.learner, clients=self.nodes,
            steps=self.steps, batch=self.batch, lr=self.lr, momentum=self.momentum,
            rounds=self.rounds, target=self.target, budget_s=self.budget_s, clock=self.clock,
            hosts=self.hosts, seed=self.seed,
        )  # fmt: skip


class GossipPlan(Plan[GossipJob]):
    """A plan of nodes without a server.

    Args:
        parameters: of the model.
        samples: examples of each node.
        edges: of the graph.
        unit_s: seconds of a unit of time, of policies with clocks of their own.
    """

    parameters: int
    samples: tuple[int, ...]
    edges: int
    unit_s: float


class GossipReport(Report[GossipPlan]):
    """A report of nodes without a server; its details have the curve, the nodes and the layers."""
