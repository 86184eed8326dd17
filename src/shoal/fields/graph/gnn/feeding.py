"""The table of features that the batches of a job gather from."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice
from shoal.fields.graph.gather.protocols import FeaturePlacement
from shoal.fields.graph.gather.table import FeatureTable, placed
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.graph.sample.neighbours import NeighbourSampler, epoch_samples, most_nodes


def table_of(
    job: TrainGnnJob,
    placement: Choice | FeaturePlacement,
    data: ClassifiedGraph,
    features: np.ndarray,
    seed: int,
) -> FeatureTable:
    """A table with room for the largest batch.

    Args:
        job: has fan-outs.
        placement: a part of kind ``feature_source``, or its choice.
        data: the graph.
        features: float32 [N, F].
        seed: of the training.
    """
    part = placed(placement)

    def accesses() -> np.ndarray:
        counts = np.zeros(data.graph.num_nodes, np.int64)
        sampler = NeighbourSampler(data.graph, job.fanouts, seed)
        for batch in epoch_samples(sampler, data.train, job.batch_size, 1):
            counts[batch.nodes] += 1
        return counts

    return FeatureTable(
        np.ascontiguousarray(features, np.float32),
        part,
        batch_rows=most_nodes(data.graph, job.fanouts, min(job.batch_size, len(data.train))),
        host_bytes_per_s=job.host_bytes_per_s,
        heat=part.heat(np.diff(data.graph.indptr), accesses),
    )
