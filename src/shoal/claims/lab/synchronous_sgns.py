"""Skip-gram with negative samples on replicas that are made equal after every batch.

Each rank has both tables whole and trains on pairs of its own; then all ranks add up how every row
has changed that any of them has touched, as synchronous data parallelism does.
"""

from __future__ import annotations

import numpy as np

from shoal.claims.frame import wire_bytes
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.meter import Meter
from shoal.core.random import generator, seed64
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.embedding.graphvite.native import (
    AliasTable,
    draw_negatives,
    train_block,
    walk_pairs,
)
from shoal.fields.graph.embedding.graphvite.part import GraphVite, shuffled


def synchronous_sgns(
    graph: CSRGraph, part: GraphVite, *, pairs: int, batch: int, world: int, seed: int
) -> tuple[np.ndarray, float]:
    """Vectors, float32 [N, dim], and bytes that all ranks have sent.

    Args:
        graph: without weights, of which every node has neighbours.
        part: the options of training.
        pairs: that all ranks train on together.
        batch: pairs of a rank between two exchanges.
        world: ranks.
        seed: of what is random.
    """
    import torch

    each = sum(min(part.reach, part.length - 1 - at) for at in range(part.length))
    starts, nodes = AliasTable.of(graph.degrees()), np.arange(graph.num_nodes, dtype=np.int32)
    table = AliasTable.of(graph.degrees() ** 0.75)
    walks, rounds = max(1, batch // each), -(-pairs // (batch * world))
    meter = Meter()

    def rank(comm: ThreadComm) -> np.ndarray:
        draw = generator(seed, purpose="graphvite")
        shape = (graph.num_nodes, part.dim)
        vertex = ((draw.random(shape, np.float32) - 0.5) / part.dim).astype(np.float32)
        tables = [vertex, np.zeros(shape, np.float32)]

        def exchanged(rows: np.ndarray, name: str, before: np.ndarray, now: np.ndarray) -> None:
            touched = torch.zeros(graph.num_nodes, dtype=torch.uint8)
            touched[torch.from_numpy(np.unique(rows).astype(np.int64))] = 1
            comm.all_reduce(touched, tag=f"rows of {name}", op="max").wait()
            some = np.flatnonzero(touched.numpy())
            change = torch.from_numpy(now[some] - before[some])
            comm.all_reduce(change, tag=name).wait()
            now[some] = before[some] + change.numpy()

        for turn in range(rounds):
            first = (turn * world + comm.rank) * walks
            mine = walk_pairs(
                graph, None, starts, range(first, first + walks), part.length, part.reach, seed
            )
            mine = shuffled(mine, part.reach)
            key = seed64(seed, purpose="negatives", step=turn, index=comm.rank)
            negatives = draw_negatives(nodes, table, len(mine), key)
            rate = part.rate * (1 - turn / rounds), part.rate * (1 - (turn + 1) / rounds)
            before = [one.copy() for one in tables]
            train_block(
                mine, negatives, *tables, rate=rate, weight=part.negative_weight, decay=part.decay
            )
            exchanged(mine[:, 0], "vertex", before[0], tables[0])
            exchanged(np.append(mine[:, 1], negatives), "context", before[1], tables[1])
        return tables[0]

    vectors, *others = run_ranks(world, rank, meter=meter, timeout_s=600)
    for one in others:
        np.testing.assert_array_equal(one, vectors)
    return vectors, wire_bytes(meter.totals())
