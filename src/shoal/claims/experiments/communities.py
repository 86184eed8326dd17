"""[38] Communities: do signatures answer in milliseconds what exact similarities take long for?

Source: Chamberlain et al., Real-Time Community Detection in Large Social Networks on a Laptop,
2016.

A graph of 100,000 vertices and 20 million edges has planted communities; queries have five seeds of
one and add 50 vertices, by each of three expansions. The time of a query is compared with that of
the exact similarities of all pairs, really computed each round; what an exact query of the seeds
alone takes is in the details. Both answer by the same expansions, whose recall is compared, also on
the graph of packages with the section as truth. Building is signatures only, of one thread, and
bit by bit those of the peer. In the A/A run the exact similarities are in the signatures' place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.community_arms import (
    METHODS,
    all_pairs_s,
    alone,
    ask,
    datasketch_signatures,
    follows,
    own_signatures,
    package_queries,
    planted_communities,
    planted_queries,
    recalls,
    rows_s,
    scipy_rows_s,
)
from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.communities import AdjacencySets, SignatureGraph
from shoal.fields.graph.communities.adjacency import sets_of

_HASHES, _SEEDS = 1000, 5


@part
class CommunitiesClaim(BaseClaim, row=38, needs=("c++", "datasketch")):
    """Communities of a planted graph and of packages, by signatures and by exact sets.

    Args:
        vertices: of the planted graph.
        edges: that are drawn; some of them are drawn again.
        queries: that are timed.
        judged: queries whose recall is compared.
        signed: vertices whose signatures are compared with the peer's.
        rounds: of each timing.
    """

    vertices: int = 100_000
    edges: int = 27_000_000
    queries: int = 60
    judged: int = 40
    signed: int = 1000
    rounds: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Bytes, and equality with the peer; the full run times and judges."""
        large = follows(60 if run.quick else 300, 6000, run.seed)
        sets = sets_of(large, "in")
        signed = SignatureGraph.from_edges(large, side="in", hashes=_HASHES)
        exact = sets.indices.nbytes
        own = run.pick(signed.signatures.nbytes, exact)
        run.put("bytes_over_sets", own / exact)
        run.details["bytes"] = {**signed.memory(), "sets": exact}
        few, _ = planted_communities(2000, 40_000, run.seed)
        ours, theirs = (one(few, 100, 128)[0] for one in (own_signatures, datasketch_signatures))
        run.put("equal_slots", float((ours == theirs).mean()))
        if not run.quick:
            self._planted(run)
            self._packages(run)

    def _planted(self, run: ClaimRun) -> None:
        run.progress("drawing the graph", 0.05)
        graph, group = planted_communities(self.vertices, self.edges, run.seed)
        queries = planted_queries(group, self.queries, _SEEDS, run.seed)
        with scratch_directory("communities") as place:
            saved = graph.save(place / "graph")
            said = alone(saved, queries, run.as_baseline, place)
        run.put("slowest_query_s", said["slowest_s"])
        run.put("peak_bytes", said["peak_bytes"])
        signed, sets = SignatureGraph.from_edges(graph), AdjacencySets(sets_of(graph, "both"))
        run.details.update(
            edges=graph.nnz // 2, alone=said, memory=signed.memory(), cut=list(signed.cut),
            adjacency_bytes=int(graph.indices.nbytes),
        )  # fmt: skip
        self._recall(run, "recall_gap", signed, sets, queries[: self.judged], group)
        run.progress("timing", 0.4)
        p95: list[float] = []

        def query() -> float:
            seconds = [ask(signed, queries, method)[1] for method in METHODS]
            p95.append(max(float(np.percentile(one, 95)) for one in seconds))
            return float(np.mean(seconds))

        pairs: Callable[[], float] = partial(all_pairs_s, sets)
        turns = 1 if run.as_baseline else self.rounds  # the A/A run is judged by no interval
        times = run.turns({"query": run.pick(query, pairs), "pairs": pairs}, turns)
        run.put("over_all_pairs", times["query"], times["pairs"])
        run.put("p95_s", run.pick(p95, times["query"]))
        rows = np.arange(100)
        peer = run.turns(
            {"own": partial(rows_s, sets, rows), "scipy": partial(scipy_rows_s, sets, rows)},
            self.rounds,
        )
        run.put_peer("over_all_pairs", peer["own"], peer["scipy"])
        exact = [ask(sets, queries[:20], method)[1] for method in METHODS]
        run.details["exact_query_s"] = dict(zip(METHODS, map(np.median, exact), strict=True))
        run.progress("building", 0.8)
        build = {"own": own_signatures, "datasketch": datasketch_signatures}
        built = run.turns(
            {name: partial(_seconds, one, graph, self.signed) for name, one in build.items()},
            self.rounds,
            warmup=1,
        )
        run.put("build_speedup", built[run.pick("own", "datasketch")], built["datasketch"])
        run.details["seconds"] = {"query": times["query"], "pairs": times["pairs"], **built}

    def _packages(self, run: ClaimRun) -> None:
        try:
            signed, sets, queries, group = package_queries(3 * self.judged, _SEEDS)
        except DataError as cause:
            run.skip(str(cause), "package_recall_gap")
            return
        self._recall(run, "package_recall_gap", signed, sets, queries, group)

    def _recall(self, run: ClaimRun, metric: str, signed: Any, sets: Any, *asked: Any) -> None:
        """The largest loss of recall among the expansions."""
        both = {"signatures": run.pick(signed, sets), "exact": sets}
        found = {name: recalls(one, *asked) for name, one in both.items()}
        run.put(metric, max(np.subtract(found["exact"], found["signatures"])))
        run.details[metric] = found


def _seconds(build: Callable[..., tuple[np.ndarray, float]], graph: CSRGraph, count: int) -> float:
    return build(graph, count, _HASHES)[1]
