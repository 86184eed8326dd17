"""What embedding costs: the rates of a machine.

Rates are timed here in about two seconds, and kept in ``embedding.json`` of Shoal's home for this
processor; a machine that is only described is taken to have such cores, by their peak rate.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from shoal.core.random import generator
from shoal.fields.graph.embedding.deepwalk import DeepWalk
from shoal.fields.graph.embedding.fastrp.native import product, projection
from shoal.fields.graph.embedding.protocols import EmbedRates
from shoal.fields.graph.graph import CSRGraph
from shoal.fields.rates import least_seconds, machine_rates
from shoal.ir import Machine

# FLOP/s in fp32 of the core whose rates are below: one of Intel's Sapphire Rapids.
_FLOPS = 1.2e11
_THERE = EmbedRates(add_s=3e-10, draw_s=2e-9, pass_s=1.5e-9, walk_s=4e-8, word_s=2e-10, spread=2.0)
_SPREAD = 0.8
# Of the graph that is timed: its vectors are no longer in the caches of a core.
_NODES, _EDGES, _DIM = 40_000, 200_000, 128


def rates_of(machine: Machine) -> EmbedRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(machine, "embedding.json", _THERE, timed, _FLOPS)


def timed() -> EmbedRates:
    """Time the loops of FastRP, walks and, where gensim is installed, word2vec on this machine."""
    draw = generator(0, purpose="embedding rates")
    graph = CSRGraph.from_edges(*draw.integers(0, _NODES, (2, _EDGES)), num_nodes=_NODES)
    size = _NODES * _DIM
    keys, every = np.arange(_NODES), slice(0, _NODES)
    draw_s, _ = least_seconds(lambda: projection(keys, _DIM, 3.0, 0))
    x = draw.standard_normal((_NODES, _DIM), np.float32)
    out, mixed = np.empty_like(x), np.zeros_like(x)
    ones = np.ones(_NODES, np.float32)

    def power(of: CSRGraph) -> float:
        return least_seconds(
            lambda: product(
                of, x, ones, rows=every, out=out, mixed=mixed, alpha=1.0, normalise=True
            )
        )[0]

    none = np.zeros(0, np.int64)
    passed = power(CSRGraph.from_edges(none, none, num_nodes=_NODES))
    added = max(power(graph) - passed, 0.1 * passed)
    small = CSRGraph.from_edges(*draw.integers(0, 2000, (2, 10_000)), num_nodes=2000)
    few = DeepWalk(dim=_DIM, walks=1, epochs=1)
    walked, paths = least_seconds(lambda: [*few.paths(small, 0)], 1)
    word_s = _THERE.word_s
    if importlib.util.find_spec("gensim") is not None:
        few.fit(small, seed=0)  # the first one reads and compiles
        trained, _ = least_seconds(lambda: few.fit(small, seed=0), 1)
        pairs = paths[0].size * (few.window + 1)
        word_s = max(trained - walked, 0.1 * trained) / (pairs * (1 + few.negative) * _DIM)
    return EmbedRates(
        add_s=added / (graph.nnz * _DIM),
        draw_s=draw_s / size,
        pass_s=passed / size,
        walk_s=walked / paths[0].size,
        word_s=word_s,
        spread=_SPREAD,
    )
