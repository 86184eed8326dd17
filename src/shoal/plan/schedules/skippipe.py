"""SkipPipe: every micro-batch visits only some of the stages, on a route of its own.

On slow and unequal networks a route avoids slow links and busy nodes; the model tolerates it
and becomes robust to missing layers. This changes what is computed: the gradient of a stage
is the mean over the tokens that visited it. Stage 0 holds embedding and output layer, so
every route ends on the rank where it began.

Without ``keep``, ``of``, ``swap`` and ``network`` nothing is skipped, and this is 1F1B.

Source: Blagoev et al., SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs
in Heterogeneous Networks, 2025.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import MachineLinks, simulate
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.ir.estimate import Estimate, Interval
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import OpCosts, Schedule
from shoal.plan.routes.arrange import default_sizes
from shoal.plan.routes.conflicts import plan_routes
from shoal.plan.routes.network import WanNetwork
from shoal.plan.routes.path import RouteProblem
from shoal.plan.routes.plan import RouteTask, plan, to_schedule
from shoal.plan.schedules.common import boundary_estimate, check_numbers, looped
from shoal.plan.schedules.one_f_one_b import OneFOneB

# Of equal stages without a network.
_FORWARD, _BACKWARD = 1000, 2000


@part
class SkipPipe:
    """Micro-batches skip stages, on a network of heterogeneous nodes or on equal ranks.

    Args:
        keep: stages that a micro-batch visits, stage 0 included; None for all.
        of: stages of the model; None for one on each rank. With fewer stages than ranks, several
            ranks hold the same stage and average its gradients.
        swap: a micro-batch may visit two neighbouring stages in reverse order.
        network: file of a network (see ``shoal explain routes``), in which node i is rank i; by
            default links take no time and ranks are equal.
        forward_s: on a network, s of a stage's forward pass on a node of speed 1.
        backward_s: on a network, s of its backward pass.
        head_s: on a network, s of the output layer's forward pass.
        boundary_bytes: on a network, bytes of a micro-batch's activations between stages.
        sync_bytes: on a network, bytes of a stage's gradients.
        most_in_flight: largest number of micro-batches whose activations a rank holds; None for the
            number of stages, as in 1F1B.
        effort: nodes of the solver's tree, and attempts to improve a plan.
        seed: seed of the solver.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"skips_stages"})
    keep: Annotated[int, Ge(1)] | None = None
    of: Annotated[int, Ge(1)] | None = None
    swap: bool = False
    network: str = ""
    forward_s: float = 0.3
    backward_s: float = 0.6
    head_s: float = 0.1
    boundary_bytes: float = 8e6
    sync_bytes: float = 1e8
    most_in_flight: Annotated[int, Ge(1)] | None = None
    effort: Annotated[int, Ge(0), Le(100_000)] = 50
    seed: int = 0

    chunks: ClassVar[int | None] = 1
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "head_s", "boundary_bytes", "sync_bytes"):
            number = getattr(self, name)
            free = name not in ("forward_s", "backward_s")
            require(
                math.isfinite(number) and (number > 0 or (free and number == 0)),
                f"schedule.skippipe.{name}",
                number,
                expected="0 or more" if free else "more than 0",
            )
        require(
            self.of is None or self.keep is None or self.keep <= self.of,
            "schedule.skippipe.keep",
            self.keep,
            expected=f"1 to of = {self.of}, the stages",
        )

    @property
    def _plain(self) -> bool:
        return self.keep is None and self.of is None and not self.swap and not self.network

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Stages are spread over the ranks; see the module's description.

        Raises:
            PlanError: more stages than ranks, more kept than there are, or no plan keeps the
                constraints; names the one that binds.
            ConfigError: the network's file cannot be read.
        """
        check_numbers("skippipe", pp, microbatches, vpp, self.chunks)
        if self._plain or pp == 1:
            return OneFOneB().build(pp, microbatches, vpp)
        stages = self.of or pp
        require(
            stages <= pp,
            "schedule.skippipe.of",
            stages,
            expected=f"at most pp = {pp}: a rank holds one stage",
            error=PlanError,
        )
        require(
            (self.keep or stages) <= stages,
            "schedule.skippipe.keep",
            self.keep,
            expected=f"1 to {stages}, the stages",
            error=PlanError,
        )
        keep = self.keep or stages
        require(
            microbatches * (keep - 1) >= stages - 1,
            "microbatches",
            microbatches,
            expected=f"enough for every stage to be visited, with keep = {keep} of {stages}: "
            + (f"at least {-(-(stages - 1) // (keep - 1))}" if keep > 1 else "keep at least 2"),
            error=PlanError,
        )
        network = WanNetwork.load(Path(self.network)) if self.network else None
        if network is not None:
            require(
                len(network.nodes) == pp,
                "parallel.pp",
                pp,
                expected=f"{len(network.nodes)}, the nodes of network {network.name}",
                error=PlanError,
            )
        return _built(self, pp, microbatches, network)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """Idle time as a share of the work of a rank if nothing were skipped.

        Below zero where skipping saves more than waiting costs.
        """
        if self._plain or pp == 1:
            return OneFOneB().bubble(pp, microbatches, vpp)
        schedule = self.build(pp, microbatches, vpp)
        head = schedule.num_cells - 1
        ones = tuple(float(cell != head) for cell in schedule.cell_of)
        result = simulate(schedule, OpCosts(seconds={"F": ones, "B": tuple(2 * n for n in ones)}))
        return result.makespan / (3 * microbatches * head / pp) - 1.0

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """The most of any rank."""
        if self._plain or pp == 1:
            return OneFOneB().in_flight(pp, microbatches, vpp)
        return float(max(self.build(pp, microbatches, vpp).in_flight()))

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of the boundaries that the busiest rank sends, over the links of the routes."""
        job = work.job
        if self._plain or job.parallel.pp == 1:
            return boundary_estimate(work, machine, looped(job.parallel.pp, 1))
        microbatch = microbatch_of(job)
        passes = passes_of(job, microbatch)
        schedule = self.build(job.parallel.pp, passes)
        split = job.parallel.tp * job.parallel.cp
        size = 4.0 * microbatch * job.seq_len * work.shape.hidden / split
        near = MachineLinks(machine, job.parallel.attention())
        far = WanNetwork.load(Path(self.network)) if self.network else None
        seconds, sent = [0.0] * schedule.ranks, [0.0] * schedule.ranks
        scopes = {"wan"} if far is not None else set()
        for mb in range(passes):
            for one, other in pairwise(schedule.place[s] for s in schedule.route(mb)):
                for a, b in ((one, other), (other, one)):
                    if a != b:
                        seconds[a] += (far or near).seconds(a, b, size)
                        sent[a] += size
                        if far is None:
                            scopes.add(near.scope(a, b))
        busiest = max(range(schedule.ranks), key=seconds.__getitem__)
        scope = "node" if "node" in scopes else next(iter(sorted(scopes)), "")
        total = seconds[busiest]
        return Estimate(
            step_s=Interval.around(total, 0.3),
            terms_s={"collective": total},
            wire_bytes={scope: sent[busiest]} if scope else {},
        )


@lru_cache(maxsize=64)
def _built(options: SkipPipe, pp: int, microbatches: int, network: WanNetwork | None) -> Schedule:
    stages = options.of or pp
    keep = options.keep or stages
    if network is not None:
        task = RouteTask(
            stages=stages,
            keep=keep,
            swap=options.swap,
            microbatches=microbatches,
            forward_s=options.forward_s,
            backward_s=options.backward_s,
            head_s=options.head_s,
            boundary_bytes=options.boundary_bytes,
            sync_bytes=options.sync_bytes,
            in_flight=options.most_in_flight,
            effort=options.effort,
            seed=options.seed,
        )
        return plan(network, task).schedule
    sizes = default_sizes(pp, stages, keep)
    ends = [sum(sizes[: s + 1]) for s in range(stages)]
    problem = RouteProblem(
        stages=tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)),
        microbatches=microbatches,
        keep=keep,
        swap=options.swap,
        forward=(_FORWARD,) * pp,
        backward=(_BACKWARD,) * pp,
        head=(0,) * pp,
        links=((0,) * pp,) * pp,
        in_flight=(options.most_in_flight or stages,) * pp,
    )
    routes = plan_routes(problem, effort=options.effort, seed=options.seed)
    return to_schedule(problem, routes, ranks=pp)
