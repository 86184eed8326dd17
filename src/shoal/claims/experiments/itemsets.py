"""[87] Itemsets: which data favours Apriori, Eclat or FP-growth, and can the choice be automatic?

Source: Heaton, Comparing Dataset Characteristics that Favor the Apriori, Eclat or FP-Growth
Frequent Itemset Mining Algorithms, 2016.

Ours and the peers are called as a user calls them: from Python lists of numbers to a table or a
list of sets. Of pyfim (C) the fastest of five miners counts, chosen for each shape. mlxtend gets a
frame of the frequent items only. The A/A run has the peer, and Eclat in Apriori's place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments import itemset_runs as runs
from shoal.claims.experiments.itemset_shapes import planted, shapes
from shoal.claims.frame import ClaimRun
from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.fields.data.mine.baskets import from_lists
from shoal.fields.data.mine.protocols import MiningProblem, TooManyError

_WIDTHS, _SHARES = (10, 20, 30, 40, 50, 60), (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8)
# A cell with more sets is one that does not finish.
_MOST = 20_000_000


@part
class ItemsetsClaim(BaseClaim, row=87, needs=("c++", "fim", "mlxtend")):
    """Six shapes beside pyfim and mlxtend; the paper's generator over widths and shares.

    Args:
        pairs: rounds of each timing.
        baskets: of the generator.
    """

    pairs: int = 9
    baskets: int = 50_000

    def collect(self, run: ClaimRun) -> None:
        """Whether all agree; the full run times six shapes, then the cells of the generator."""
        fim: Any = import_extra("fim", extra="bench", purpose="the peer of the claim")
        sizes = [planted(4000, size, 0.5) for size in (10, 24)]
        few, many = (runs.operations(run.pick("apriori", "eclat"), shape) for shape in sizes)
        base, more = (runs.operations("eclat", shape) for shape in sizes)
        run.put("operations_growth", (many / few) / (more / base))
        if run.quick:
            run.put("different", runs.different(fim, planted(4000, 12, 0.5)))
            return
        wrong, choices = 0, []
        for name, shape in run.remember("shapes", shapes).items():
            run.progress(f"timing {name}", 0.1)
            wrong += run.remember(f"{name} agrees", partial(runs.different, fim, shape))
            fastest = run.remember(f"{name} peer", partial(runs.fastest_of_pyfim, fim, shape))
            method, theirs = partial(runs.ours, shape), partial(runs.pyfim, fim, fastest, shape)
            run.put(f"over_pyfim_{name}", *runs.race_of(run, method, theirs, self.pairs))
            run.details[f"pyfim_{name}"] = fastest
            choices.append(runs.choice_of(run, shape, self.pairs))
        shape = run.remember("shapes", shapes)["planted"]
        frame = run.remember("frame", partial(runs.frame_of, shape))
        slow = partial(runs.mlxtend, frame, shape)
        run.put("over_mlxtend", *runs.race_of(run, partial(runs.ours, shape), slow, self.pairs))
        worst = max(choices, key=lambda pair: float(np.median(np.divide(*pair))))
        run.put("chosen_over_fastest", *worst)
        run.put("different", wrong + self._cells(run, fim))

    def _cells(self, run: ClaimRun, fim: Any) -> int:
        """Time every miner and the choice on each cell that finishes; count those that differ."""
        near, finished, wrong = [], [], 0
        for size, share in [(size, 0.5) for size in _WIDTHS] + [(40, share) for share in _SHARES]:
            run.progress(f"baskets of {size}, {share:.0%} planted", 0.6)
            shape = planted(self.baskets, size, share)
            problem = MiningProblem(from_lists(shape.rows), shape.least, max_itemsets=_MOST)
            arms = runs.mined(problem)
            try:
                first, *others = [arm() for arm in arms.values()]
            except TooManyError:
                continue
            wrong += sum(not first.same_as(other) for other in others)
            fits = {
                one: partial(runs.seconds_of, partial(runs.ours, shape, one))
                for one in (*arms, "auto")
            }
            said = run.turns(fits, 3)
            medians = {one: float(np.median(taken)) for one, taken in said.items()}
            near.append(float(medians["auto"] <= 1.3 * min(medians[one] for one in arms)))
            finished.append({"size": size, "planted": share, "sets": len(first), **medians})
        run.put("auto_near_best", near)
        run.details["cells"] = finished
        self._growth(
            run, fim, max(int(cell["size"]) for cell in finished if cell["planted"] == 0.5)
        )
        return wrong

    def _growth(self, run: ClaimRun, fim: Any, widest: int) -> None:
        """Time at the largest width that finishes, over that at 10."""
        names = {"method": run.pick("apriori", "eclat"), "eclat": "eclat", "fpgrowth": "fpgrowth"}
        arms: dict[str, Callable[[], float]] = {}
        for size in (10, widest):
            shape = planted(self.baskets, size, 0.5)
            problem = MiningProblem(from_lists(shape.rows), shape.least)
            for name, arm in runs.mined(problem, names).items():
                arms[f"{name} {size}"] = partial(runs.seconds_of, arm)
        said = run.turns(arms, self.pairs, warmup=1)
        grown = {name: np.divide(said[f"{name} {widest}"], said[f"{name} 10"]) for name in names}
        run.put("growth", grown["method"], np.maximum(grown["eclat"], grown["fpgrowth"]))
        run.details["widest"] = widest
        peer = {
            "ours": partial(runs.seconds_of, partial(runs.ours, shape, "apriori")),
            "theirs": partial(runs.seconds_of, partial(runs.pyfim, fim, "apriori", shape)),
        }
        beside = run.remember("peer", partial(run.turns, peer, 5))
        run.put_peer("growth", beside["ours"], beside["theirs"])
