"""[78] ScalingNote: does a small query tower keep what large towers have learned?

Source: Huang et al., ScalingNote: Scaling up Retrievers with Large Language Models for Real-World
Dense Retrieval, 2024.

Pairs of this machine: first lines of documentation and what stands below them, and descriptions of
packages and what the index says beside them. Towers of 2 layers of 128 (S), 4 of 256 and 8 of 384
(L) learn from them; S learns the vectors of L's queries, and looks for documents among those that
L has encoded. Beside it S learns the pairs, in two or six passes, from its last layer or from all,
whichever is best on queries that are for choosing. Recall is that of each tenth of the queries that
are held out. Queries are timed one by one, tokens included. The law is of contrastive entropy. The
A/A run has the pair S, the tower L in time, and a constant for the law.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

if TYPE_CHECKING:
    from pydantic import JsonValue

_CODE = (
    "fields/retrieve/towers", "fields/retrieve/grank/documents.py", "model", "corpora",
    "train/optimizers", "train/lr_schedules", "claims/lab/tower_runs.py",
)  # fmt: skip
# Groups of queries, documents of an answer, pairs of the law over those, queries of a round.
_GROUPS, _K, _FEWER, _QUERIES = 10, 10, (3, 9, 27), 20


@part
class ScalingNoteClaim(BaseClaim, row=78, needs=("torch", "transformers")):
    """Two stages beside one, and the law of sizes and pairs.

    Args:
        pairs: that are learned from.
        held: to choose by, and as many to judge by.
        rounds: of each timing.
        threads: of learning.
    """

    pairs: Annotated[int, Ge(1000)] = 32_000
    held: Annotated[int, Ge(100)] = 2000
    rounds: Annotated[int, Ge(5)] = 15
    threads: Annotated[int, Ge(1)] = 2

    def collect(self, run: ClaimRun) -> None:
        """The theorem and a copied student; the full run learns, or has learned, and times."""
        from shoal.claims.lab import tower_runs

        violated = tower_runs.random_violations(2000, run.seed, bound=run.pick(True, False))
        run.put("margin_violations", violated)
        run.put("copied_loss", tower_runs.copied_loss(run.seed, layers=run.pick(3, 2)))
        if run.quick:
            return
        run.put("ranks_apart", self._ranks(run.seed))
        make = partial(tower_runs.tower_split, self.pairs, self.held, run.seed)
        split = run.remember("pairs", make)
        options: list[JsonValue] = [self.pairs, self.held, run.seed]
        fewer = [self.pairs // fewer for fewer in _FEWER]

        def say(text: str) -> None:
            run.progress(text, 0.3)

        towers = partial(tower_runs.main_runs, split, run.seed, self.threads, say)
        points = partial(tower_runs.law_points, split, fewer, run.seed, self.threads, say)
        made = run.context.keep("towers", towers, given=options, code=_CODE)
        law = run.context.keep("law", points, given=[*options, *fewer], code=_CODE)
        self._found(run, made.value)
        self._law(run, [*made.value["points"], *law.value])
        run.details |= {"towers": made.details(), "law": law.details()}
        run.progress("timing", 0.9)
        arms = tower_runs.online_arms(split, run.seed, _QUERIES)
        pair = {"encode_over_large": ("small", "large")}
        seconds = run.versus(arms, pair, self.rounds, threads=1)
        run.put_peer("encode_over_large", seconds["large"], seconds["peer"])
        run.details["query_s"] = {
            name: sorted(one)[len(one) // 2] / _QUERIES for name, one in seconds.items()
        }

    def _found(self, run: ClaimRun, value: dict[str, Any]) -> None:
        recall = {
            name: [float((part < _K).mean()) for part in np.array_split(np.array(ranks), _GROUPS)]
            for name, ranks in value["ranks"].items()
        }
        ours = recall[run.pick("S+L", "S+S")]
        run.put("recall_kept", ours, recall["L+L"])
        run.put("over_end_to_end", ours, recall["S+S"])
        run.put("index_changed", float(len(set(value["index"])) - 1))
        run.put("violations_here", value["violations"])
        run.put("test_queries_learned", value["test_queries_learned"])
        run.details["recall"] = {name: sum(one) / len(one) for name, one in recall.items()}
        said = ("valid", "chosen", "seconds", "surely_same", "mean_bound")
        run.details |= {name: value[name] for name in said}

    def _law(self, run: ClaimRun, points: list[dict[str, float]]) -> None:
        from shoal.cost.scaling.curve import CurvePoint
        from shoal.cost.scaling.fit import fit

        law = fit("joint", [CurvePoint(**one) for one in points], seed=run.seed)
        # A constant explains nothing of what varies.
        run.put("law_r2", run.pick(law.r2, 0.0))
        run.details["points"] = points
        run.details["parameters"] = {name: one.value for name, one in law.parameters.items()}

    def _ranks(self, seed: int) -> float:
        """Two processes with half the batch each, beside one with all."""
        from shoal.parallel.comm.processes import run_processes

        target, given = "shoal.claims.lab.tower_runs:rank_gradients", {"batch": 16, "seed": seed}
        alone, shared = (np.array(run_processes(target, n, given)[0]) for n in (1, 2))
        return float(np.abs(alone - shared).max())
