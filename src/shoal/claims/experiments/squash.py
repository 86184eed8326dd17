"""[44] SQUASH: do quantised vectors and attributes beat bitmaps, and trees of functions a loop?

Source: Oakley and Ferhatosmanoglu, SQUASH: Serverless and Distributed Quantization-based
Attributed Vector Similarity Search, 2025.

Every query has ranges of four uniform attributes of its own. Ours is tuned to recall@10 on other
queries, IVF has the least effort that reaches it on those that are judged; all answer one at a time
in one thread, in turn. Making the bitmap is part of the baselines' time, as filtering is of ours.
Functions run in processes, each in a container that was started before; a dispatch holds its caller
for 20 ms. The A/A run has faiss's IVFFlat, the scan, and the launch one after another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.filtered_arms import (
    FilteredPhotos,
    osq_arm,
    seconds_of,
    touched_by,
    tuned_effort,
    tuned_osq,
)
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.fields.retrieve.index import OSQIndex
from shoal.fields.retrieve.index.osq.files import save_index
from shoal.fields.retrieve.serverless import FunctionGateway, FunctionSearch

# Tuned to a little more than is judged, for the queries are others.
_RECALL, _LEAST, _SELECTIVITY, _LATENCY_S = 0.975, 0.97, 0.08, 0.02
# With the signs, three bits for each number are less than a seventh of four bytes.
_BITS = 3.0
# Each takes seconds, and its time is one of sleeps.
_LAUNCHES = 5


@part
class SquashClaim(BaseClaim, row=44, needs=("c++", "faiss", "sklearn")):
    """Filtered queries of descriptors of photographs, and functions that start each other.

    Args:
        vectors: how many.
        rounds: of each timing.
    """

    vectors: int = 300_000
    rounds: int = 7

    def collect(self, run: ClaimRun) -> None:
        """Bytes and bytes read; the full run times all arms, and launches."""
        count, queries, parts = self.vectors, 240, [32, 64]
        if run.quick:
            count, queries, parts = 6_000, 20, [4]
        made = FilteredPhotos(count, _SELECTIVITY, run.seed)
        tuning = made.asked(queries * 2 // 3, run.seed + 1)
        asked = made.asked(queries, run.seed + 2)
        run.progress("building", 0.1)
        index, settings = tuned_osq(made, tuning, _RECALL, _BITS, parts, run.seed)
        sizes = index.memory()
        codes = sizes["codes"] + sizes["signs"] + sizes["tags"]
        run.put("code_size", run.pick(codes, made.vectors.nbytes) / made.vectors.nbytes)
        arms = {"osq": osq_arm(index, settings), "ivf": made.faiss_ivf(), "scan": made.scan()}
        effort = {"osq": 0.0, "scan": 0.0, "ivf": tuned_effort(made, arms["ivf"], asked, _LEAST)}
        recalls = {name: made.recall(arm, asked, effort[name]) for name, arm in arms.items()}
        run.put("recall", recalls[run.pick("osq", "ivf")])
        run.put("baseline_recall", min(recalls["ivf"], recalls["scan"]))
        run.details.update(
            recall=recalls, effort=effort, settings=settings._asdict(), bytes=dict(sizes),
            passed=float(np.mean([np.unpackbits(made.bitmap(one)).mean() for one in asked])),
            touched=touched_by(index, settings, asked),
        )  # fmt: skip
        run.progress("functions", 0.5)
        self._functions(run, index, asked)
        if run.quick:
            return
        run.progress("timing", 0.7)
        arms["flat"], effort["flat"] = made.faiss_flat(), 0.0
        turns = {name: partial(seconds_of, arm, asked, effort[name]) for name, arm in arms.items()}
        said = run.turns(turns, self.rounds, warmup=1)
        for name in ("ivf", "scan"):
            run.put(f"over_{name}", said[run.pick("osq", name)], said[name])
        run.put_peer("over_scan", said["scan"], said["flat"])
        run.details["query_s"] = {name: float(np.median(one)) for name, one in said.items()}
        run.details["bitmap_s"] = {
            "compiled": seconds_of(lambda one, effort: made.bitmap(one), asked, 0.0),
            "numpy": seconds_of(lambda one, effort: made.numpy_bitmap(one), asked, 0.0),
        }

    def _functions(self, run: ClaimRun, index: OSQIndex, asked: Any) -> None:
        """Bytes that warm containers read, and how long launches of a tree and a loop take."""
        tree, hold_s, backend = (
            ("2x2", 0.5, "in_process") if run.quick else ("4x3", 2.5, "processes")
        )
        with scratch_directory("squash") as root:
            place = save_index(index, root / "osq")
            with FunctionGateway(backend, place) as runtime:
                one, search = asked[0], FunctionSearch(runtime, "1x1")
                first, again = (search.search(one.query, 10, where=one.where) for _ in range(2))
                read = [sum(call.read_bytes for call in found.calls) for found in (first, again)]
                run.put("read_again", run.pick(read[1], read[0]))
                run.details["read_bytes"] = read
            with FunctionGateway(backend, place, latency_s=_LATENCY_S) as runtime:
                search = FunctionSearch(runtime, tree)
                runtime.provision("allocator", search.tree.nodes)
                launches = {
                    name: partial(search.launch, hold_s, flat=flat)
                    for name, flat in (("tree", False), ("flat", True))
                }
                said = run.turns(launches, 2 if run.quick else _LAUNCHES, warmup=1)
                run.put("workers", runtime.containers / search.tree.nodes)
        run.details["launch_s"] = {name: float(np.median(one)) for name, one in said.items()}
        if not run.quick:
            run.put("launch", said[run.pick("tree", "flat")], said["flat"])
