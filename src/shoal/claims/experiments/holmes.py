"""[12] Holmes: do gradients that stay inside clusters make mixed networks nearly as fast as RDMA?

Source: Yang et al., Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC
Environment, 2023.

Two described clusters of two nodes of eight A100 (200 Gbit/s InfiniBand, 100 Gbit/s RoCE, 10 Gbit/s
Ethernet between): simulated steps with the plan's ranks, with hosts in turn from both, and on four
nodes of the slower RDMA; the plan beside all orders of eight ranks. Four processes in two pairs, 50
Mbit/s between the pairs: steps, and equal weights. The A/A run has hosts in turn.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.arch_training import mini
from shoal.claims.experiments.tiny import train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from shoal.plan.topology.clusters import Clusters

_RANKS = "shoal.claims.experiments.co2_ranks:time_steps"
# Models, and ranks of a layer with which they fit.
_MODELS = (("Llama-3.2-3B", 1), ("Qwen3-4B", 1), ("Llama-3-8B", 2))
_GBIT = 1e9 / 8


@part
class HolmesClaim(BaseClaim, row=12, needs=("torch",)):
    """Ranks that know their networks beside ranks that do not.

    Args:
        global_batches: sequences of simulated steps, of 2,048 tokens; at least one a device.
        microbatch: sequences of a pass.
        bandwidth: byte/s between the pairs of processes.
        steps: timed steps of a turn.
        turns: how often both placements are timed.
    """

    global_batches: tuple[Annotated[int, Ge(32)], ...] = (256, 512)
    microbatch: Annotated[int, Ge(1)] = 1
    bandwidth: Annotated[float, Ge(1)] = 6.25e6
    steps: Annotated[int, Ge(1)] = 3
    turns: Annotated[int, Ge(1)] = 14

    def __post_init__(self) -> None:
        some = bool(self.global_batches)
        require(some, "claim.holmes.global_batches", [], expected="at least one number")

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("simulated steps", 0.02)
        fields = {
            f"{model}, {size} sequences": self._simulated(model, tp, size)
            for model, tp in _MODELS
            for size in self.global_batches
        }
        ours = [one[run.pick("plan", "in turn")] for one in fields.values()]
        run.progress("all orders of eight ranks", 0.1)
        run.put("simulated", ours, (one["in turn"] for one in fields.values()))
        run.put("of_rdma", ours, (one["rdma"] for one in fields.values()))
        crossing = run.pick("crossing", "turn crossing")
        run.put("crossing", (one[crossing] for one in fields.values()))
        run.put("over_best", _over_best(in_turn=run.as_baseline))
        if run.quick:
            return
        if run.lacks(unavailable(), "real", "other_weights"):
            return
        run.progress("steps in two pairs of namespaces", 0.2)
        seconds, unlike = self._timed(run)
        run.put("real", seconds["plan"], seconds["in turn"])
        run.put("other_weights", unlike)
        run.profile = ", ".join(
            f"{name} {1e3 * sorted(of)[len(of) // 2]:.0f} ms a step" for name, of in seconds.items()
        )

    def _simulated(self, model: str, tp: int, size: int) -> dict[str, float]:
        """Seconds of a step of a model, and dp groups between clusters."""
        from shoal.ir import TrainJob
        from shoal.plan.topology.groups import crossing, groups
        from shoal.plan.topology.order import Price, plan_order
        from shoal.plan.topology.ways import interleaved

        job = TrainJob(model=model, seq_len=2048, global_batch=size, microbatch=self.microbatch)
        mixed = _clusters(("infiniband", 200), ("roce", 100))
        result = plan_order(job, mixed, pp=2, tp=tp)
        turn = interleaved(mixed)
        same = _clusters(("roce", 100), nodes=4)
        return {
            "plan": result.step.seconds,
            "in turn": Price(job, mixed, result.grid)(turn)[0].seconds,
            "rdma": plan_order(job, same, pp=2, tp=tp).step.seconds,
            "crossing": float(result.crossing),
            "turn crossing": float(crossing(groups(mixed, turn, result.grid, "dp"))),
        }

    def _timed(self, run: ClaimRun) -> tuple[dict[str, list[float]], int]:
        """Seconds of steps by placement, of the slowest rank; and weights that differ."""
        from shoal.plan.topology.order import plan_order
        from shoal.plan.topology.ways import interleaved

        # A process is a node; the two of a namespace are a cluster.
        pairs = _clusters(("ethernet", 40), ("ethernet", 40), per_node=1)
        job = train_job(
            model="shoal-1m",
            seq_len=128,
            global_batch=8,
            microbatch=1,
            optimizer={"name": "adamw", "lr": 2e-3},
        )
        order = plan_order(job, pairs, pp=2, tp=1)
        split = order.parallel().model_copy(update={"stages": (3, 3)})
        job = job.model_copy(update={"parallel": split})
        where = run.arms(
            {"plan": order.devices, "in turn": interleaved(pairs)}, {"plan": "in turn"}
        )
        seconds: dict[str, list[float]] = {name: [] for name in where}
        norms: dict[str, list[list[float]]] = {}
        with emulate(2, bandwidth=self.bandwidth) as network:
            for number in range(self.turns):
                for name in list(where)[:: -1 if number % 2 else 1]:
                    ranks = on_ranks(
                        _RANKS, 4, network=network, ranks_per_node=1, timeout_s=300.0, job=job,
                        hosts=[pairs.places[device].cluster for device in where[name]],
                        config=mini(128, 6, tied=False), steps=self.steps,
                    )  # fmt: skip
                    seconds[name].append(sorted(slowest(ranks, "seconds"))[self.steps // 2])
                    norms[name] = [rank["norms"] for rank in ranks]
        ours, theirs = (itertools.chain(*norms[name]) for name in where)
        return seconds, sum(a != b for a, b in zip(ours, theirs, strict=True))


def _clusters(*networks: tuple[str, float], nodes: int = 2, per_node: int = 8) -> Clusters:
    """Clusters of A100 with these networks in Gbit/s of a node, and 10 Gbit/s between them."""
    from shoal.plan.topology.clusters import Clusters

    return Clusters.model_validate(
        {
            "name": "mixed",
            "device": "A100",
            "devices_per_node": per_node,
            "clusters": [
                {"name": f"{nic}-{at}", "nodes": nodes, "nic": nic, "bandwidth": gbit * _GBIT}
                for at, (nic, gbit) in enumerate(networks)
            ],
            "common": {"bandwidth": 10 * _GBIT},
        }
    )


def _over_best(*, in_turn: bool) -> tuple[float, ...]:
    """How much longer than with the best of all orders a step takes, as a share."""
    from shoal.ir import TrainJob
    from shoal.plan.topology.groups import DegreeGrid
    from shoal.plan.topology.order import Price, brute, plan_order
    from shoal.plan.topology.ways import interleaved

    job = TrainJob(model="shoal-27m", seq_len=512, global_batch=8, microbatch=1)
    four = _clusters(("infiniband", 200), ("roce", 100), per_node=2)
    three = _clusters(("infiniband", 200), ("roce", 100), ("ethernet", 10), nodes=1, per_node=2)
    results = []
    for clusters, grid in (
        (four, DegreeGrid(2, 4, 1)),
        (four, DegreeGrid(2, 2, 2)),
        (four, DegreeGrid(4, 2, 1)),
        (three, DegreeGrid(3, 2, 1)),
    ):
        priced = Price(job, clusters, grid)
        best, _ = brute(priced)
        devices = (
            interleaved(clusters)
            if in_turn
            else plan_order(job, clusters, pp=grid.pp, tp=grid.tp).devices
        )
        results.append(priced(devices)[0].seconds / best - 1.0)
    return tuple(results)
