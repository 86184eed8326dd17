"""[14] DADAO: how many exchanges and gradients does it take, without rounds, to the optimum?

Source: Nabli and Oyallon, DADAO: Decoupled Accelerated Decentralized Asynchronous Optimization,
2023.

Linear regression of ten nodes whose coefficients differ, with L / mu of about 93. Models count
where the mean squared distance to the closed form is 1e-6 of what it was. DADAO and ADOM+ have the
constants of their proofs; gradient tracking has the step and the laziness with which it is fastest.
All are counted on the virtual clock; six processes on a cycle do the same over sockets. The A/A run
has ADOM+ or gradient tracking in the place of DADAO, and uniform rates in that of optimal ones.
"""

from __future__ import annotations

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.regression import CLOSE, GossipCost, distance_run
from shoal.core.parts import part, table
from shoal.fields.federate.gossip.execute import virtual, wall
from shoal.fields.federate.gossip.rates import optimal_rates, uniform_rates

_TOPOLOGIES = ("cycle", "path", "star", "complete")
_TRACKED = ("cycle", "path")
# Of an A/A run with processes, which ends before it has come near.
_BEGUN = 0.1


@part
class DadaoClaim(BaseClaim, row=14, needs=("clarabel", "torch")):
    """Exchanges and gradients to a distance of 1e-6, on four graphs.

    Args:
        seeds: of data, models and clocks.
        nodes: of the graphs.
        spread: largest variance of a feature over the smallest, which makes the condition.
    """

    seeds: int = 3
    nodes: int = 10
    spread: float = 85.0

    def collect(self, run: ClaimRun) -> None:
        """Count on every graph; the quick run has the cycle, once."""
        graph = table("topology").build("barbell").graph(self.nodes, 0)
        best = run.pick(optimal_rates, uniform_rates)(graph)
        run.put("barbell_rate", best.total, uniform_rates(graph).total)
        for at, name in enumerate(("cycle",) if run.quick else _TOPOLOGIES):
            run.progress(name, at / (len(_TOPOLOGIES) + 1))
            self._count(run, name, 1 if run.quick else self.seeds)
        if not run.quick:
            self._processes(run)

    def _count(self, run: ClaimRun, name: str, seeds: int) -> None:
        mine, adom, tracking = [], [], []
        for seed in range(seeds):
            one = distance_run(
                run.work_dir, seed, name, self.nodes, spread=self.spread, clock="virtual"
            )
            adom.append(GossipCost(*run.remember(f"{name} {seed} adom", one.adom)))
            mine.append(adom[-1] if run.as_baseline else one.dadao())
            if name in _TRACKED:
                tracking.append(GossipCost(*run.remember(f"{name} {seed} tracking", one.tracking)))
            mu, smooth = one.bounds()
            run.details.setdefault("conditions", []).append(smooth / mu)
        run.details[name] = {"dadao": mine, "adom": adom, "tracking": tracking}
        if name == "complete":  # whose gradients are reported, and held against nothing
            return
        run.put(f"{name}_exchanges", _activations(mine), _activations(adom))
        run.put(f"{name}_gradients", _gradients(mine), _gradients(adom))
        if tracking:
            mine = run.pick(mine, tracking)
            run.put(f"{name}_tracking_exchanges", _activations(mine), _activations(tracking))
            run.put(f"{name}_tracking_gradients", _gradients(mine), _gradients(tracking))

    def _processes(self, run: ClaimRun) -> None:
        """Six processes on a cycle, beside the virtual clock."""
        run.progress("processes", len(_TOPOLOGIES) / (len(_TOPOLOGIES) + 1))
        real, same = (
            distance_run(run.work_dir, 0, "cycle", 6, spread=self.spread, clock=clock)
            for clock in ("wall", "virtual")
        )
        real.wanted = run.pick(CLOSE, _BEGUN)
        said, counted = wall(real), virtual(same)
        run.put("process_distance", real.distance)
        run.put("process_messages", said.measured["messages"], counted.measured["messages"])
        run.details["processes"] = {
            "seconds": said.measured["total_s"],
            "refused": said.details["refused"],
            "failed": said.details["failed"],
        }


def _activations(costs: list[GossipCost]) -> list[float]:
    return [one.activations for one in costs]


def _gradients(costs: list[GossipCost]) -> list[float]:
    return [one.gradients for one in costs]
