"""[57] GraphVite: how much sooner than word2vec on stored walks, and what crosses its workers?

Source: Zhu et al., GraphVite: A High-Performance CPU-GPU Hybrid System for Node Embedding, 2019.

Both embed the largest component of the graph of packages, in 128 numbers, on as many threads, and
train on as many pairs; the walks of gensim's word2vec are written first, which counts as its time.
Bytes are those of a worker's rows that another worker goes on with. Beside them stand, for the
pairs of one pool, those of replicas that add up how touched rows have changed after every batch of
a hundred thousand pairs. In the A/A run word2vec, and the replicas, are in GraphVite's place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.embedding_arms import TimedEmbeddings
from shoal.core.errors import DataError
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.fields.graph import CSRGraph, package_graph
from shoal.fields.graph.embedding.deepwalk import DeepWalk
from shoal.fields.graph.embedding.graphvite.part import GraphVite
from shoal.fields.graph.embedding.judging import divided, judged_f1
from shoal.fields.graph.embedding.protocols import NodeEmbedder

# Pairs of a rank between two exchanges of the replicas.
_BATCH = 100_000
# Packages, below which the graph is another one.
_LEAST = 20_000


@part
class GraphViteClaim(BaseClaim, row=57, needs=("c++", "gensim", "sklearn", "torch")):
    """GraphVite beside word2vec on stored walks and beside synchronous replicas.

    Args:
        rounds: of the timing, with a seed of its own.
        judged: nodes whose labels are used.
        train_share: of these, of which the classifier learns.
    """

    rounds: int = 5
    judged: int = 20_000
    train_share: float = 0.1

    def collect(self, run: ClaimRun) -> None:
        """The quick run counts bytes on a small graph; the full one times and judges vectors."""
        if run.quick:
            draw = np.random.default_rng(run.seed)
            ends = (20_000 * draw.random((2, 100_000)) ** 2).astype(np.int64)
            small = CSRGraph.from_edges(*ends, num_nodes=20_000).largest_component()
            self._bytes(run, small, GraphVite(dim=16, epochs=40))
            return
        every = [metric.name for metric in self.metrics]
        try:
            graph = package_graph("section").largest_component()
        except DataError as cause:
            run.skip(str(cause), *every)
            return
        few = f"{graph.num_nodes:,} packages; apt-get update fetches the others"
        if not run.lacks(few if graph.num_nodes < _LEAST else None, *every):
            self._race(run, graph)

    def _race(self, run: ClaimRun, graph: CSRGraph) -> None:
        threads, walks = num_cores(), DeepWalk()
        # As many pairs as gensim trains on, of which a single pass says how many they are.
        once = replace(walks, epochs=1).fit(graph, seed=run.seed, threads=threads).details
        pairs = walks.epochs * once["pairs"]
        blocks = GraphVite(epochs=max(1, round(pairs / (graph.nnz / 2))))

        def vectors(part: NodeEmbedder, seed: int) -> np.ndarray:
            return part.fit(graph, seed=seed, threads=threads).vectors

        timed = TimedEmbeddings(run.seed)
        ours: NodeEmbedder = walks if run.as_baseline else blocks
        arms = {
            "graphvite": timed.arm("graphvite", partial(vectors, ours)),
            "word2vec": timed.arm("word2vec", partial(vectors, walks)),
        }
        # word2vec takes long, and the A/A run is judged by no interval.
        said = run.turns(arms, 1 if run.as_baseline else self.rounds)
        run.put("over_word2vec", said["graphvite"], said["word2vec"])
        assert graph.labels is not None
        nodes = divided(
            graph.labels, train_share=self.train_share, tuning_share=0, most=self.judged,
            seed=run.seed,
        )  # fmt: skip
        f1 = {
            name: [judged_f1(rows, graph.labels, nodes).micro for rows in kept]
            for name, kept in timed.kept.items()
        }
        run.put("micro_gap", [b - a for a, b in zip(f1["graphvite"], f1["word2vec"], strict=True)])
        run.progress("synchronous replicas", 0.9)
        self._bytes(run, graph, replace(blocks, epochs=max(1, 2 * blocks.episode // graph.nnz)))
        run.details.update(
            nodes=graph.num_nodes, edges=graph.nnz // 2, threads=threads, pairs=pairs, micro=f1,
            stored_bytes=once["stored_bytes"],
            pairs_per_s={name: pairs / float(np.median(one)) for name, one in said.items()},
        )  # fmt: skip

    def _bytes(self, run: ClaimRun, graph: CSRGraph, part: GraphVite) -> None:
        """Bytes between two workers; in the full run for the pairs of one pool."""
        from shoal.claims.lab.synchronous_sgns import synchronous_sgns

        said = part.fit(graph, seed=run.seed, threads=2).details
        _, sent = synchronous_sgns(
            graph, part, pairs=said["pairs"], batch=_BATCH, world=2, seed=run.seed
        )
        run.put("moved_bytes", run.pick(float(said["moved_bytes"]), sent), sent)
