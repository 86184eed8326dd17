"""Methods in which all nodes wait for each round: what DADAO is compared with.

All of them see the same losses and start from the same models. A round of gossip uses every edge
once; the gossip matrix is the Laplacian over its largest eigenvalue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from shoal.fields.federate.gossip.graphs import NodeGraph

Gradients = Callable[[np.ndarray], np.ndarray]
"""Gradients [n, P] of all nodes' losses at their models [n, P]."""

Iterate = tuple[np.ndarray, int, int]
"""Models [n, P], gradients and edge activations so far, of all nodes together."""


def adom_plus(
    graph: NodeGraph, gradients: Gradients, x: np.ndarray, mu: float, smoothness: float
) -> Iterator[Iterate]:
    """ADOM+ with multi-consensus: accelerated in both, with several rounds of gossip a gradient.

    Source: Kovalev et al., Lower Bounds and Optimal Algorithms for Smooth and Strongly Convex
    Decentralized Optimization over Time-Varying Networks, 2021, algorithm 1, theorem 2, section 4.

    Args:
        graph: of the nodes.
        gradients: of their losses.
        x: first models, [n, P].
        mu: of strong convexity.
        smoothness: L.
    """
    n, L = graph.nodes, smoothness
    values = np.linalg.eigvalsh(graph.laplacian())
    rounds = math.ceil(values[-1] / values[1] * math.log(2))
    away = np.linalg.matrix_power(np.eye(n) - graph.laplacian() / values[-1], rounds)
    W, chi = np.eye(n) - away, 2.0
    tau2 = math.sqrt(mu / L)
    tau1, sigma2 = 1 / (1 / tau2 + 0.5), tau2 / (16 * chi)
    sigma1, eta, nu = 1 / (1 / sigma2 + 0.5), 1 / (L * tau2), mu / 2
    alpha, beta, delta, zeta = mu / 2, 1 / (2 * L), 1 / (17 * L), 0.5
    theta, gamma = nu / (4 * sigma2), nu / (14 * sigma2 * chi**2)
    y, z, m = (np.zeros_like(x) for _ in range(3))
    x_f, y_f, z_f = x, y, z
    made = used = 0
    while True:
        x_g = tau1 * x + (1 - tau1) * x_f
        y_g, z_g = (sigma1 * one + (1 - sigma1) * f for one, f in ((y, y_f), (z, z_f)))
        gradient = gradients(x_g) - nu * x_g
        # x and y of the next iterate depend on each other: x = p + q y, and y is solved for.
        q = eta / (1 + eta * alpha)
        p = (x + eta * alpha * x_g - eta * gradient) / (1 + eta * alpha)
        right = y + theta * beta * gradient - theta * ((y_g + z_g) / nu + p)
        y_new = right / (1 + theta * beta + theta * q)
        x_new = p + q * y_new
        mixed = W @ (gamma / nu * (y_g + z_g) + m)
        z_new = z + gamma * delta * (z_g - z) - mixed
        m = gamma / nu * (y_g + z_g) + m - mixed
        x_f, y_f = x_g + tau2 * (x_new - x), y_g + sigma2 * (y_new - y)
        z_f = z_g - zeta * W @ (y_g + z_g)
        x, y, z = x_new, y_new, z_new
        made, used = made + n, used + rounds * len(graph.edges)
        yield x, made, used


def gradient_tracking(
    graph: NodeGraph, gradients: Gradients, x: np.ndarray, step: float, lazy: float = 0.0
) -> Iterator[Iterate]:
    """Gradient tracking: each node follows the mean gradient, one round of gossip a gradient.

    Models and trackers travel together, so an edge is used once in a round.

    Source: Nedić, Olshevsky, Shi, Achieving Geometric Convergence for Distributed Optimization
    over Time-Varying Graphs, 2017, algorithm 1, in the adapt-then-combine form.

    Args:
        graph: of the nodes.
        gradients: of their losses.
        x: first models, [n, P].
        step: of the gradient.
        lazy: share of the own model beyond that of the matrix that mixes fastest.
    """
    values = np.linalg.eigvalsh(graph.laplacian())
    # Of all W = I - c Laplacian the one that mixes fastest.
    W = np.eye(graph.nodes) - (1 - lazy) * graph.laplacian() * 2 / (values[-1] + values[1])
    before = gradients(x)
    tracker = before
    made, used = graph.nodes, 0
    while True:
        x = W @ (x - step * tracker)
        now = gradients(x)
        tracker = W @ (tracker + now - before)
        before = now
        made, used = made + graph.nodes, used + len(graph.edges)
        yield x, made, used
