"""[96] FlexSP: are groups of different sizes, solved for every batch, faster than one size?

Source: Wang et al., Data-Centric and Heterogeneity-Adaptive Sequence Parallelism for Efficient LLM
Training (FlexSP), 2024.

Fifty batches of 64 files of the standard library on 16 described A100 (nodes of eight; 156 TFLOP/s,
300 GB/s, 400 Gbit/s between nodes): predicted seconds by the integer program beside the best single
degree by the same search. Two processes: seconds of a step beside the one degree that holds them,
packed or one by one, whichever is faster. Steps beside one process. The A/A run has the best single
degree.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments import ragged
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

_CAPACITY, _WORLD = 8192, 16
_FLOPS, _LINKS = 156e12, ((8, 300e9), (16, 6.25e9))


@part
class FlexSPClaim(BaseClaim, row=96, needs=("torch",)):
    """Groups by an integer program beside one degree for all.

    Args:
        batches: batches that are solved.
        sequences: sequences of each.
        limit_s: s that the solver may take for one.
        documents: documents of the step that two processes make.
        longest: tokens of its longest one.
        turns: number of times that it is timed.
        seeds: ragged batches that are compared with one process.
    """

    batches: Annotated[int, Ge(2)] = 50
    sequences: Annotated[int, Ge(2)] = 64
    limit_s: float = 2.0
    documents: Annotated[int, Ge(2)] = 40
    longest: Annotated[int, Ge(2)] = 2048
    turns: Annotated[int, Ge(2)] = 9
    seeds: Annotated[int, Ge(2)] = 4

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.ragged_ranks import errors

        result = self._solved(run)
        ratios = [one["one_degree_s"] / one["seconds"] for one in result]
        run.put("over_one_degree", ratios)
        run.put("least_over_one_degree", ratios)
        run.progress("steps beside one process", 0.75)
        batching: dict[str, Any] = run.pick(
            {"name": "flexsp", "capacity_tokens": 12, "limit_s": 0.3},
            {"name": "packed", "capacity_tokens": 16, "cp": 2, "exchange": "ulysses"},
        )
        seeds = range(run.seed, run.seed + (1 if run.quick else self.seeds))
        run.put("error", errors(batching, seeds))
        run.details |= {
            "batches": result,
            "over_one_degree_with_50_GB/s_between_nodes": self._elsewhere(run.seed),
        }
        if run.quick:
            return
        run.put("solver_s", (one["solver_s"] for one in result))
        run.progress("two real ranks", 0.8)
        sizes = ragged.lengths()
        chosen = np.random.default_rng(run.seed).choice(sizes, self.documents, replace=False)
        part = {"name": "flexsp", "capacity_tokens": self.longest // 2, "limit_s": 2.0}
        ragged.race_ranks(run, chosen, self.longest, self.turns, "ulysses", part)

    def _solved(self, run: ClaimRun) -> list[dict[str, float]]:
        """Of each batch, predicted seconds of both, and s that it took to decide."""
        from shoal.plan.balance.sequences.flexsp import FlexSP, best_homogeneous
        from shoal.plan.balance.sequences.groups import RankPool

        pool = RankPool(_WORLD, _CAPACITY, ragged.cost_of(32, _FLOPS, _LINKS))
        sizes = np.minimum(ragged.lengths(), _WORLD * _CAPACITY)
        part = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.5 if run.quick else self.limit_s)
        search = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.0)
        source = np.random.default_rng(run.seed)
        results = []
        count = 4 if run.quick else self.batches
        for number in range(count):
            run.progress("batches", 0.75 * number / count)
            lengths = source.choice(sizes, self.sequences, replace=False).tolist()
            degree, single = best_homogeneous(lengths, pool)
            begin = time.perf_counter()
            seconds = single if run.as_baseline else part.solve(lengths, pool).seconds
            solver_s = time.perf_counter() - begin
            results.append(
                {
                    "seconds": seconds,
                    "one_degree_s": single,
                    "degree": degree,
                    "longest": max(lengths),
                    "solver_s": solver_s,
                    "without_solver_s": search.solve(lengths, pool).seconds,
                }
            )
        return results

    def _elsewhere(self, seed: int) -> list[float]:
        """The same of four batches where links between nodes are eight times as fast, by search."""
        from shoal.plan.balance.sequences.flexsp import FlexSP, best_homogeneous
        from shoal.plan.balance.sequences.groups import RankPool

        pool = RankPool(_WORLD, _CAPACITY, ragged.cost_of(32, _FLOPS, ((8, 300e9), (16, 50e9))))
        search = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.0)
        sizes = np.minimum(ragged.lengths(), _WORLD * _CAPACITY)
        source = np.random.default_rng(seed)
        results = []
        for _ in range(4):
            lengths = source.choice(sizes, self.sequences, replace=False).tolist()
            single = best_homogeneous(lengths, pool)[1]
            results.append(single / search.solve(lengths, pool).seconds)
        return results
