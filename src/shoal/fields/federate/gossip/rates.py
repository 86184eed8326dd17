"""How often each edge should be used: the constants of a graph, and the rates that are optimal.

Edges are used at random times, edge e at the rate lambda_e. With the weighted Laplacian Lambda,
chi1 = 1 / (its smallest positive eigenvalue) says how slowly far nodes agree, and chi2 = half of
the largest effective resistance between neighbours. DADAO needs chi1 chi2 <= 1/2; the fewer
exchanges in a unit of time that takes, the better the rates.

Source: Nabli and Oyallon, DADAO: Decoupled Accelerated Decentralized Asynchronous Optimization,
2023, sections 3 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.core.extras import import_extra
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.protocols import FederationError

# Below this, relative to the largest, an edge's rate is 0.
_NONE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeRates:
    """Rates of edges, and their constants.

    Args:
        rates: exchanges of each edge in a unit of time, float64 [E].
        chi1: 1 / smallest positive eigenvalue of the weighted Laplacian.
        chi2: half of the largest effective resistance of an edge.
    """

    rates: np.ndarray
    chi1: float
    chi2: float

    @property
    def total(self) -> float:
        """Exchanges of the whole graph in a unit of time."""
        return float(self.rates.sum())


def constants(graph: NodeGraph, rates: np.ndarray) -> EdgeRates:
    """chi1 and chi2 of rates as they are.

    Raises:
        FederationError: the edges with a positive rate do not connect the graph.
    """
    laplacian = graph.laplacian(rates)
    values = np.linalg.eigvalsh(laplacian)
    if values[1] <= 1e-12 * values[-1]:
        raise FederationError(
            "rates: the edges that are used do not connect the nodes; give more of them a rate"
        )
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    i, j = np.array(graph.edges).T
    resistance = inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]
    return EdgeRates(rates=rates, chi1=float(1 / values[1]), chi2=float(resistance.max() / 2))


def feasible(graph: NodeGraph, rates: np.ndarray) -> EdgeRates:
    """The same proportions, scaled so that chi1 chi2 = 1/2."""
    shares = rates / rates.sum()
    unit = constants(graph, shares)
    total = math.sqrt(2 * unit.chi1 * unit.chi2)
    return EdgeRates(rates=shares * total, chi1=unit.chi1 / total, chi2=unit.chi2 / total)


def uniform_rates(graph: NodeGraph) -> EdgeRates:
    """Every edge as often as any other."""
    return feasible(graph, np.ones(len(graph.edges)))


def optimal_rates(graph: NodeGraph) -> EdgeRates:
    """The rates with the smallest sum for which chi1 chi2 <= 1/2.

    Minimizes sum(lambda) where Lambda - a Pi, Lambda - b (e_i - e_j)(e_i - e_j)^T for each edge,
    and [[a, 1], [1, b]] are positive semidefinite: then chi1 <= 1/a, chi2 <= 1/(2b), ab >= 1. All
    matrices are restricted to the vectors of sum 0, where Lambda has no null space.

    Raises:
        MissingExtraError: Clarabel is not installed.
        FederationError: the solver stopped without an answer.
    """
    clarabel = import_extra("clarabel", extra="fields", purpose="optimal rates of a graph")
    from scipy import sparse

    n, edges = graph.nodes, len(graph.edges)
    # An orthonormal basis of the vectors of sum 0: Helmert's matrix.
    basis = np.linalg.qr(np.eye(n) - 1.0 / n)[0][:, : n - 1]
    differences = np.zeros((edges, n))
    rows = np.arange(edges)
    i, j = np.array(graph.edges).T
    differences[rows, i], differences[rows, j] = 1.0, -1.0
    vectors = differences @ basis
    # Variables: lambda [E], a, b. A cone holds s = b0 - A v, as a scaled upper triangle.
    of_edges = np.stack([_triangle(np.outer(one, one)) for one in vectors], axis=1)
    zero = np.zeros((len(of_edges), 1))
    identity = _triangle(np.eye(n - 1))[:, None]
    blocks = [-np.eye(edges, edges + 2), -np.hstack([of_edges, -identity, zero])]
    blocks += [-np.hstack([of_edges, zero, -of_edges[:, [at]]]) for at in range(edges)]
    corner = np.zeros((3, edges + 2))
    corner[0, edges], corner[2, edges + 1] = -1.0, -1.0
    A = np.vstack([*blocks, corner])
    right = np.zeros(len(A))
    right[-2] = math.sqrt(2)
    cones = [clarabel.NonnegativeConeT(edges)]
    cones += [clarabel.PSDTriangleConeT(n - 1)] * (edges + 1) + [clarabel.PSDTriangleConeT(2)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    cost = np.r_[np.ones(edges), 0.0, 0.0]
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix((edges + 2, edges + 2)),
        cost,
        sparse.csc_matrix(A),
        right,
        cones,
        settings,
    )
    solution = solver.solve()
    rates = np.maximum(np.array(solution.x[:edges]), 0.0)
    if not np.isfinite(rates).all() or rates.max() <= 0:
        raise FederationError(f"rates: the solver stopped ({solution.status}); take uniform rates")
    rates[rates < _NONE * rates.max()] = 0.0
    best, even = feasible(graph, rates), uniform_rates(graph)
    # Both are feasible; rounding may put the solver's a hair above where uniform is the optimum.
    return best if best.total < even.total * (1 - 1e-6) else even


def _triangle(M: np.ndarray) -> np.ndarray:
    """Upper triangle by columns, what is off the diagonal times sqrt(2): the norm is kept."""
    columns, rows = np.tril_indices(len(M))
    scale = np.where(rows == columns, 1.0, math.sqrt(2))
    result: np.ndarray = M[rows, columns] * scale
    return result
