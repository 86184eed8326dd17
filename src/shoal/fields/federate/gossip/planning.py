"""The plan of a job without a server: its nodes are driven on a virtual clock, without learning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.parts import table
from shoal.fields.federate.clients import ClientSpec, parse_clients
from shoal.fields.federate.costs import step_rates
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.gossip.job import GossipJob, GossipPlan
from shoal.fields.federate.gossip.local import NoWork
from shoal.fields.federate.gossip.protocols import GossipNode, GossipPolicy, LocalWork, Spot
from shoal.fields.federate.gossip.virtual import VirtualGossip
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.planning import divided
from shoal.fields.rates import core_share
from shoal.ir import Interval, Machine
from shoal.machine import load

# FLOP/s of the core of a described device whose share is 1.
_CORE = 1e11
# Seconds of a message on one machine, and of an exchange of a pair, handshake included, whatever
# their size.
_MESSAGE_S, _EXCHANGE_S = 5e-4, 1.5e-3
HEADER_BYTES = 200
"""Of a message besides its tensors, the words of a handshake included."""
# Of the predicted time, where steps were timed here, and where they were derived.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.3, 2.0
# The process that starts and tests, one of nodes, and a node in it without its models.
_MAIN_BYTES, _PROCESS_BYTES, _NODE_BYTES = 4.1e8, 2.6e8, 2e6
# Events of a rehearsal; a longer run is taken for a repetition of its beginning.
_EVENTS = 5_000


@dataclass(frozen=True, kw_only=True)
class GossipSetting:
    """A job with its parts made.

    Args:
        job: what to do.
        policy: its policy.
        graph: its graph.
        train: examples of all nodes.
        test: what was held out.
        rows: of each node.
        parameters: of the model.
    """

    job: GossipJob
    policy: GossipPolicy
    graph: NodeGraph
    train: Examples
    test: Examples
    rows: list[np.ndarray]
    parameters: int

    @property
    def specs(self) -> tuple[ClientSpec, ...]:
        """The nodes as described."""
        return parse_clients(self.job.nodes)

    def nodes(
        self, works: list[LocalWork], *, work_s: list[float], unit_s: float, rounds: int
    ) -> list[GossipNode]:
        """All nodes of the graph."""
        shared = self.policy.share(self.graph, works)
        return [
            self.policy.node(
                Spot(
                    me=me, graph=self.graph, seed=self.job.seed, start=start_seed(self.job, me),
                    rounds=rounds, work_s=work_s[me], unit_s=unit_s, shared=shared,
                ),
                work,
            )
            for me, work in enumerate(works)
        ]  # fmt: skip

    def link_s(self) -> list[float]:
        """Seconds of a message of each node."""
        size = self.policy.message_bytes(self.parameters)
        return [
            _MESSAGE_S + (size / one.bytes_per_s if one.bytes_per_s else 0.0) for one in self.specs
        ]


def start_seed(job: GossipJob, me: int) -> int:
    """Of a node's first model."""
    return job.seed if job.same_start else (job.seed + 1) * 100_003 + me


def setting_of(job: GossipJob) -> GossipSetting:
    """The parts of a job.

    Raises:
        ShoalError: the data cannot be read or divided, or there is no such graph.
    """
    federate = job.as_federate()
    train, test, rows = divided(federate)
    learner = table("learner").build(job.learner, where="learner")
    count = len(parse_clients(job.nodes))
    return GossipSetting(
        job=job,
        policy=table("gossip_policy").build(job.policy, where="policy"),
        graph=table("topology").build(job.topology, where="topology").graph(count, job.seed),
        train=train,
        test=test,
        rows=rows,
        parameters=learner.shape(train.x.shape[1:], train.classes)[0],
    )


@dataclass(frozen=True, kw_only=True)
class GossipTimes:
    """What a node's work takes.

    Args:
        work_s: seconds of a piece of work of each node.
        unit_s: seconds of a unit of time.
        measured: steps were timed here.
    """

    work_s: list[float]
    unit_s: float
    measured: bool


def times_of(setting: GossipSetting, machine: Machine) -> GossipTimes:
    """From steps that are timed or derived; on the wall the nodes share the cores of a machine."""
    job = setting.job
    features, classes = setting.train.x.shape[1:], setting.train.classes
    tests = len(setting.test)
    rates = step_rates(job.as_federate(), features, classes, tests, machine)
    here = core_share(machine, _CORE)
    crowd = 1.0
    if job.clock == "wall" and machine.device.num_cores:
        crowd = max(1.0, setting.graph.nodes / machine.device.num_cores)
    work_s = [
        rates.step_s
        * crowd
        * setting.policy.work_steps(job.steps, job.batch, len(rows))
        * (here / core_share(load(spec.device), _CORE) if spec.device else 1.0)
        for spec, rows in zip(setting.specs, setting.rows, strict=True)
    ]
    unit = setting.policy.unit_s(setting.graph, max(work_s), _EXCHANGE_S)
    return GossipTimes(work_s=work_s, unit_s=unit, measured=rates.measured)


def plan_gossip(job: GossipJob, machine: Machine) -> GossipPlan:
    """What the job takes.

    Raises:
        ShoalError: the data cannot be read or divided, the graph is not connected, or a node's
            device is unknown.
    """
    setting = setting_of(job)
    count = setting.graph.nodes
    times = times_of(setting, machine)
    works: list[LocalWork] = [NoWork() for _ in range(count)]
    nodes = setting.nodes(works, work_s=times.work_s, unit_s=times.unit_s, rounds=job.rounds)
    clock = VirtualGossip(nodes, setting.link_s())
    clock.begin()
    done, events = 0.0, 0
    while done < job.rounds and events < _EVENTS and clock.step():
        done, events = min(node.progress(clock.now) for node in nodes), events + 1
    done = min(done, job.rounds)
    total = clock.now * job.rounds / max(done, 1e-9)
    sent = setting.policy.message_bytes(setting.parameters) + HEADER_BYTES
    messages = clock.messages * job.rounds / max(done, 1e-9)
    spread = _SPREAD_TIMED if times.measured else _SPREAD_DERIVED
    hosts = processes(job, count) if job.clock == "wall" else 0
    # A node holds its model and one of each neighbour.
    held = 4.0 * setting.parameters * (3 * count + 2 * len(setting.graph.edges))
    # What is measured is the largest process; what must fit is all of them.
    memory = _MAIN_BYTES + held
    together = memory + hosts * _PROCESS_BYTES + count * _NODE_BYTES
    capacity = machine.device.main_memory.capacity_bytes
    notes = [
        "steps timed on this machine" if times.measured else "steps derived from a description",
        f"{len(setting.graph.edges)} edges; a message has "
        f"{setting.policy.message_bytes(setting.parameters) / 1e3:.4g} kB",
    ]
    if job.target is not None:
        notes.append("the run may end sooner, at the target; its rounds are the most it makes")
    return GossipPlan(
        job=job,
        machine=machine,
        predicted={
            "total_s": Interval.around(total, spread),
            "round_s": Interval.around(total / job.rounds, spread),
            "sent_bytes": Interval.around(messages * sent, 0.1),
            "messages": Interval.around(messages, 0.1),
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="nodes on a virtual clock",
        fits=not capacity or together <= capacity,
        why=f"{job.policy} on {job.topology}: {count} nodes, {len(setting.graph.edges)} edges",
        notes=tuple(notes),
        parameters=setting.parameters,
        samples=tuple(map(len, setting.rows)),
        edges=len(setting.graph.edges),
        unit_s=times.unit_s,
    )


def processes(job: GossipJob, nodes: int) -> int:
    """Processes of nodes on the wall clock."""
    return min(job.hosts or 16, nodes)
