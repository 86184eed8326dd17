"""[59] FastRP: how much sooner than DeepWalk, and how much worse?

Source: Chen et al., Fast and Accurate Network Embeddings via Very Sparse Random Projection, 2019.

Both embed the largest component of the graph of packages, in 128 numbers, on as many threads; walks
are counted as DeepWalk's time. FastRP's weights and exponent are tuned by 1 % of the labels,
which are among those that the classifier sees; DeepWalk is not tuned. The time of one embedding
with the tuned options is one metric, that of all trials another. Another implementation of FastRP,
in Rust, is timed with as many powers. In the A/A run DeepWalk is in FastRP's place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.embedding_arms import TimedEmbeddings, dense_fastrp, rust_fastrp
from shoal.core.errors import DataError
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.fields.graph import CSRGraph, package_graph
from shoal.fields.graph.embedding.deepwalk import DeepWalk
from shoal.fields.graph.embedding.fastrp.native import projection
from shoal.fields.graph.embedding.fastrp.part import FastRP
from shoal.fields.graph.embedding.judging import F1Scores, divided, judged_f1, only
from shoal.fields.graph.embedding.protocols import NodeEmbedder

_DIM, _WEIGHTS = 128, (0.0, 1.0, 6.0, 1.0)
# Packages, below which the graph is another one.
_LEAST = 20_000


@part
class FastRPClaim(BaseClaim, row=59, needs=("c++", "gensim", "fastrp", "sklearn")):
    """FastRP beside DeepWalk and another FastRP, on the graph of packages.

    Args:
        rounds: of each timing, with a seed of its own.
        judged: nodes whose labels are used.
        train_share: of these, of which the classifier learns.
    """

    rounds: int = 5
    judged: int = 20_000
    train_share: float = 0.1

    def collect(self, run: ClaimRun) -> None:
        """Distance from the formula; the full run times, and judges vectors by two labels."""
        draw = np.random.default_rng(run.seed)
        ends = (500 * draw.random((2, 3000)) ** 2).astype(np.int64)  # some have most neighbours
        small = CSRGraph.from_edges(*ends, num_nodes=500)
        ours: NodeEmbedder = FastRP(dim=32, weights=_WEIGHTS, beta=0.35)
        vectors = run.pick(ours, DeepWalk(dim=32)).fit(small, seed=run.seed).vectors
        exact = dense_fastrp(small, dim=32, weights=_WEIGHTS, beta=0.35, seed=run.seed)
        run.put("dense_gap", float(np.abs(vectors - exact).max() / np.abs(exact).max()))
        if run.quick:
            return
        rest = [metric.name for metric in self.metrics if not metric.quick]
        try:
            graph, tags = (package_graph(one).largest_component() for one in ("section", "tags"))
        except DataError as cause:
            run.skip(str(cause), *rest)
            return
        few = f"{graph.num_nodes:,} packages; apt-get update fetches the others"
        if not run.lacks(few if graph.num_nodes < _LEAST else None, *rest):
            self._race(run, graph, tags)

    def _race(self, run: ClaimRun, graph: CSRGraph, tags: CSRGraph) -> None:
        threads, several = num_cores(), tags.labels
        assert graph.labels is not None and several is not None
        by_section, by_tags = (
            divided(
                labels, train_share=self.train_share, tuning_share=0.01, most=self.judged,
                seed=run.seed,
            )
            for labels in (graph.labels, several)
        )  # fmt: skip
        tuning = only(graph.labels, by_section.tuning)
        trials, walks = FastRP(dim=_DIM, weights="tune", beta="tune"), DeepWalk(dim=_DIM)
        tuned = trials.fit(graph, seed=run.seed, threads=threads, tuning=tuning).details
        weights = tuple(map(float, tuned["weights"]))
        once = FastRP(dim=_DIM, weights=weights, beta=tuned["beta"])

        def vectors(part: NodeEmbedder, seed: int) -> np.ndarray:
            return part.fit(graph, seed=seed, threads=threads, tuning=tuning).vectors

        timed = TimedEmbeddings(run.seed)
        parts: dict[str, NodeEmbedder] = {"fastrp": once, "tuned": trials, "deepwalk": walks}
        if run.as_baseline:
            parts = {"fastrp": walks, "deepwalk": walks}
        arms = {name: timed.arm(name, partial(vectors, one)) for name, one in parts.items()}
        # DeepWalk takes long, and the A/A run is judged by no interval.
        said = run.turns(arms, 1 if run.as_baseline else self.rounds)
        run.put("over_deepwalk", said["fastrp"], said["deepwalk"])
        run.put("tuned_over_deepwalk", said[run.pick("tuned", "fastrp")], said["deepwalk"])
        if run.as_baseline:
            return
        run.progress("timing the peer", 0.6)
        peer = rust_fastrp(graph, weights, _DIM)
        raced = run.turns(
            {"again": timed.arm("again", partial(vectors, once)), "rust": timed.arm("rust", peer)},
            2 * self.rounds + 1,
            warmup=1,
        )
        run.put("over_peer", raced["again"], raced["rust"])
        run.progress("judging", 0.7)
        kept, labels = timed.kept, graph.labels
        both = ("fastrp", "deepwalk")
        f1 = {one: [judged_f1(rows, labels, by_section) for rows in kept[one]] for one in both}
        _put_f1(run, "", f1)
        pairs = zip(f1["deepwalk"], f1["fastrp"], strict=True)
        best = float(np.median([one.micro for one in f1["deepwalk"]]))
        gaps = [theirs.micro - ours.micro for theirs, ours in pairs]
        run.put("micro_gap", gaps, bound=best - 1)  # no label is wrong
        # Debtags, by vectors whose options sections have chosen.
        other = {one: [judged_f1(kept[one][0], several, by_tags)] for one in both}
        _put_f1(run, "tags_", other)
        begin = time.perf_counter()
        projection(graph.keys(), _DIM, 3.0, run.seed, threads=threads)
        drawn, whole = time.perf_counter() - begin, float(np.median(raced["again"]))
        run.profile = (
            f"of {1000 * whole:.0f} ms {1000 * drawn:.0f} ms are the projection, the others "
            f"{len(weights)} products with {graph.nnz:,} entries and {_DIM} columns"
        )
        said |= raced
        run.details.update(
            nodes=graph.num_nodes, edges=graph.nnz // 2, threads=threads, tuned=tuned,
            sections=f1, tags=other,
            seconds={name: float(np.median(one)) for name, one in said.items()},
        )  # fmt: skip


def _put_f1(run: ClaimRun, prefix: str, f1: Mapping[str, list[F1Scores]]) -> None:
    for at, name in enumerate(F1Scores._fields):
        ours, theirs = ([one[at] for one in f1[arm]] for arm in ("fastrp", "deepwalk"))
        run.put(f"{prefix}{name}_ratio", ours, theirs)
