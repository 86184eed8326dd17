"""``shoal explain gossip-rates``: how often should each edge of a graph be used?"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import Choice, part, table
from shoal.core.tables import Table, digits
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.gossip.rates import EdgeRates, optimal_rates, uniform_rates
from shoal.ir import Explanation, Machine, Progress

# Edges of the table.
_SHOWN = 30


@part
class GossipRatesStudy:
    """Constants of a graph, and the rates of its edges with which DADAO needs the least exchanges.

    Rates are exchanges in a unit of time, in which every node computes one gradient on average.
    Both choices have chi1 chi2 = 1/2, so the same number of gradients is needed.

    **Examples**

        shoal explain gossip-rates barbell --nodes 10

        shoal explain gossip-rates graph.json --nodes 4

    Args:
        topology: a topology by name, or a file of edges as JSON such as ``[[0, 1], [1, 2]]``.
        nodes: of the graph.
        seed: of random topologies.
    """

    subject: ClassVar = "topology"
    machine: ClassVar = None

    topology: str
    nodes: Annotated[int, Ge(2), Le(64)] = 10
    seed: Annotated[int, Ge(0)] = 0

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Uniform and optimal rates."""
        choice = Choice(name=self.topology)
        if self.topology.endswith(".json"):
            choice = Choice(name="edge_list", options={"file": self.topology})
        graph: NodeGraph = (
            table("topology").build(choice, where="topology").graph(self.nodes, self.seed)
        )
        even, best = uniform_rates(graph), optimal_rates(graph)
        shown = Table(
            title=f"{self.topology}: {self.nodes} nodes, {len(graph.edges)} edges",
            columns=("rates", "exchanges a unit", "chi1", "chi2"),
            rows=tuple(_row(name, one) for name, one in (("uniform", even), ("optimal", best))),
            right=" rrr",
        )
        order = sorted(range(len(graph.edges)), key=lambda at: -best.rates[at])
        edges = Table(
            title="edges, the most used first",
            columns=("edge", "uniform", "optimal"),
            rows=tuple(
                (
                    "{} - {}".format(*graph.edges[at]),
                    digits(float(even.rates[at])),
                    digits(float(best.rates[at])),
                )
                for at in order[:_SHOWN]
            ),
            right=" rr",
        )
        saved = f"optimal rates need {digits(even.total / best.total)} times fewer exchanges"
        return Explanation(
            blocks=(shown, edges, saved),
            data={
                "edges": [list(edge) for edge in graph.edges],
                "uniform": _data(even),
                "optimal": _data(best),
            },
        )


def _row(name: str, rates: EdgeRates) -> tuple[str, ...]:
    return name, digits(rates.total), digits(rates.chi1), digits(rates.chi2)


def _data(rates: EdgeRates) -> dict[str, object]:
    return {
        "rates": rates.rates.tolist(),
        "total": rates.total,
        "chi1": rates.chi1,
        "chi2": rates.chi2,
    }
