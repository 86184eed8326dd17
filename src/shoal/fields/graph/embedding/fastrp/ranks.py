"""FastRP on several ranks: each has a share of the rows, and all have the last power.

Any rank makes any row of the projection by itself. After each power the ranks put their rows
together (all-gather), which is all that they exchange: ``(q - 1) N d`` numbers. A graph that is
mapped from a common file system is read by each rank only where its rows are.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.fields.graph.embedding.fastrp.model import FastRPModel
from shoal.fields.graph.graph import CSRGraph

if TYPE_CHECKING:
    from shoal.ir.comm import Comm


def row_shares(graph: CSRGraph, world: int) -> list[slice]:
    """Rows of each rank, which have about as many entries as those of any other.

    Args:
        graph: that is divided.
        world: number of ranks.
    """
    # A row costs its entries, and one more to be written.
    cost = graph.indptr + np.arange(graph.num_nodes + 1)
    cuts = np.searchsorted(cost, np.linspace(0, cost[-1], world + 1)[1:-1])
    ends = [0, *cuts.tolist(), graph.num_nodes]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def fit_share(graph: CSRGraph, comm: Comm, **options: Any) -> tuple[slice, np.ndarray]:
    """This rank's rows and their vectors, float32 [R, d]: bit by bit those of a single run.

    Args:
        graph: the same on all ranks.
        comm: with all ranks.
        options: of :class:`FastRPModel`, the same on all ranks.

    Raises:
        EmbeddingError: the graph cannot be embedded so; on every rank.
    """
    import torch

    shares = row_shares(graph, comm.world)
    most = max(share.stop - share.start for share in shares)

    def gather(block: np.ndarray) -> np.ndarray:
        padded = np.zeros((most, *block.shape[1:]), block.dtype)
        padded[: len(block)] = block
        every = torch.empty(
            (comm.world * most, *block.shape[1:]), dtype=torch.from_numpy(padded).dtype
        )
        comm.all_gather(every, torch.from_numpy(padded), tag="fastrp").wait()
        whole = every.numpy().reshape(comm.world, most, *block.shape[1:])
        return np.concatenate(
            [rows[: one.stop - one.start] for rows, one in zip(whole, shares, strict=True)]
        )

    mine = shares[comm.rank]
    return mine, FastRPModel(graph, rows=mine, gather=gather, **options).vectors
