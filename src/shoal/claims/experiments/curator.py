"""[84] Curator: does one tree with a cut for each tenant beat filters and separate indexes?

Source: Jin et al., Curator: Efficient Indexing for Multi-Tenant Vector Databases, 2024.

Every index is tuned to the same recall@10 on queries of its own, then all answer other queries, one
at a time in one thread, in turn. Bitmaps of tenants are made before, and not counted as memory
of the shared IVF. The A/A run has the shared IVF, and the scan where small tenants are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.tenant_arms import (
    Asked,
    Tenants,
    changes_per_s,
    curator_arm,
    reading_of,
    seconds_of,
    size_of,
    touched_by,
    tuned,
    tuned_gammas,
)
from shoal.core.parts import part

# Tuned to a little more than is judged, for the queries are others.
_RECALL = 0.94
# Sizes below and above which tenants are compared with a scan.
_SMALL, _LARGE = 2_000, 50_000


@part
class CuratorClaim(BaseClaim, row=84, needs=("c++", "faiss", "sklearn")):
    """Two hundred tenants over descriptors of photographs.

    Args:
        vectors: how many.
        rounds: of each timing.
    """

    vectors: int = 300_000
    rounds: int = 7

    def collect(self, run: ClaimRun) -> None:
        """What is looked at; the full run counts bytes and times all indexes."""
        count, tenants, sizes, gammas = self.vectors, 200, (100_000, 1_000), [1, 2, 4, 16]
        if run.quick:
            count, tenants, sizes, gammas = 6_000, 10, (2_000, 300), [2]
        made = Tenants(count, tenants, *sizes, run.seed)
        tuning = made.asked(range(tenants), 3, run.seed + 1)
        asked = made.asked(range(tenants), 5, run.seed + 2)
        index = made.curator(run.seed)
        shared, filtered = made.shared_ivf()
        gamma1, gamma2 = tuned_gammas(made, index, tuning, _RECALL, gammas)
        mine = curator_arm(index, gamma1)
        arms = {"curator": mine, "ivf": filtered}
        effort = {"curator": gamma2, "ivf": tuned(made, filtered, tuning, _RECALL)}
        picked = run.pick("curator", "ivf")
        # Centres and ids that are looked at; IVF holds each id in its cells against the bitmap.
        cells, visited = shared.nlist, min(shared.nlist, effort["ivf"])
        touched = {"curator": touched_by(index, asked, gamma1, gamma2)}
        touched["ivf"] = cells + visited / cells * count
        run.put("touched_over_ivf", touched[picked] / touched["ivf"])
        if run.quick:
            return
        recalls = {name: made.recall(arm, asked, effort[name]) for name, arm in arms.items()}
        run.put("recall", recalls[picked])
        memory = sum(index.memory().values())
        run.put("memory_over_shared", run.pick(memory, size_of(shared)) / size_of(shared))
        few = [one for one in asked if len(made.owned[one.tenant]) < _SMALL]
        gained = made.recall(mine, few, effort["curator"]) - made.recall(
            filtered, few, effort["ivf"]
        )
        run.put("small_recall", run.pick(gained, 0.0))
        run.progress("building", 0.3)
        arms["scan"] = made.scan(index)
        arms["hnsw"] = made.shared_hnsw()[1]
        separate, arms["separate"] = made.separate_ivf()
        run.put("memory_over_separate", run.pick(memory, separate) / separate)
        for name in ("scan", "hnsw", "separate"):
            effort[name] = tuned(made, arms[name], tuning, _RECALL)
            recalls[name] = made.recall(arms[name], asked, effort[name])
        assert recalls["scan"] > 0.999, "a scan misses neighbours"
        run.details.update(recall=recalls, effort=effort, gamma1=gamma1, sharing=made.sharing)
        run.progress("timing", 0.6)

        def timed(some: Sequence[Asked], names: Sequence[str]) -> dict[str, list[float]]:
            return run.turns(
                {name: partial(seconds_of, arms[name], some, effort[name]) for name in names},
                self.rounds,
                warmup=1,
            )

        said = timed(asked, ["curator", "ivf", "hnsw", "separate"])
        middle = {name: float(np.median(one)) for name, one in said.items()}
        run.details["query_s"] = middle
        read_s, run.profile = reading_of(index, asked, gamma1, gamma2)
        for name in ("ivf", "hnsw"):
            ours, bound = said[run.pick("curator", name)], middle[name] / read_s
            run.put(f"over_filtered_{name}", ours, said[name], bound=bound)
        ours, bound = said[run.pick("curator", "separate")], read_s / middle["separate"]
        run.put("over_separate", ours, said["separate"], bound=bound)
        large = [rank for rank in range(tenants) if len(made.owned[rank]) > _LARGE]
        for metric, some in (
            ("small_over_scan", few),
            ("large_over_scan", made.asked(large, 50, run.seed + 3)),
        ):
            said = timed(some, ["curator", "scan"])
            run.put(metric, said[run.pick("curator", "scan")], said["scan"])
        run.put(
            "changes_per_s", [changes_per_s(index, made, mine, asked) for _ in range(self.rounds)]
        )
