"""[96] FlexSP: are groups of different sizes, solved for every batch, faster than one size?

Source: Wang et al., Data-Centric and Heterogeneity-Adaptive Sequence Parallelism for Efficient LLM
Training (FlexSP), 2024.

- Fifty batches of 64 files of the standard library, a byte a token, cut at the longest context that
  16 ranks of 8192 tokens hold; the paper's A100 nodes: eight ranks of 156 TFLOP/s with 300 GB/s
  among them and 400 Gbit/s to other nodes for all eight; a model 4096 wide. Predicted seconds by
  the integer program beside those of the best single degree, by the same search over micro-batches.
- Two processes and forty documents: seconds of a step beside the one single degree that holds them,
  packed or one after another, whichever is faster.
- Training steps of ragged batches beside one process.

The A/A run has the best single degree.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments import ragged
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part

__all__ = ["FlexSPClaim"]

_CAPACITY, _WORLD = 8192, 16
_FLOPS, _LINKS = 156e12, ((8, 300e9), (16, 6.25e9))


@part
class FlexSPClaim(BaseClaim):
    """Groups by an integer program beside one degree for all.

    Args:
        batches: that are solved.
        sequences: of each.
        limit_s: s that the solver may take for one.
        documents: of the step that two processes make.
        longest: tokens of its longest one.
        turns: how often it is timed.
        seeds: ragged batches that are compared with one process.
    """

    batches: Annotated[int, Ge(2)] = 50
    sequences: Annotated[int, Ge(2)] = 64
    limit_s: float = 2.0
    documents: Annotated[int, Ge(2)] = 40
    longest: Annotated[int, Ge(2)] = 2048
    turns: Annotated[int, Ge(2)] = 9
    seeds: Annotated[int, Ge(2)] = 4

    rows: ClassVar[tuple[int, ...]] = (96,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        from shoal.claims.experiments.ragged_ranks import errors

        result = self._solved(context, quick=quick, one=as_baseline)
        ratios = tuple(one["one_degree_s"] / one["seconds"] for one in result)
        context.progress("steps beside one process", 0.75)
        batching = (
            {"name": "packed", "capacity_tokens": 16, "cp": 2, "exchange": "ulysses"}
            if as_baseline
            else {"name": "flexsp", "capacity_tokens": 12, "limit_s": 0.3}
        )
        seeds = [context.seed + n for n in range(1 if quick else self.seeds)]
        metrics = {
            "over_one_degree": PairedSamples(method=ratios),
            "least_over_one_degree": PairedSamples(method=ratios),
            "error": PairedSamples(method=errors(batching, seeds)),
        }
        details: dict[str, Any] = {
            "batches": result,
            "over_one_degree_with_50_GB/s_between_nodes": self._elsewhere(context),
        }
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        metrics["solver_s"] = PairedSamples(method=tuple(one["solver_s"] for one in result))
        context.progress("two real ranks", 0.8)
        sizes = ragged.lengths()
        chosen = np.random.default_rng(context.seed).choice(sizes, self.documents, replace=False)
        half = self.longest // 2
        part = {"name": "flexsp", "capacity_tokens": half, "limit_s": 2.0}
        own = None if as_baseline else part
        timed, ours, theirs = ragged.raced(chosen, self.longest, self.turns, "ulysses", own)
        metrics["real_ranks"] = PairedSamples(method=timed[ours], baseline=timed[theirs])
        details["real_s"] = {name: list(seconds) for name, seconds in timed.items()}
        profile = ", ".join(f"{n} {1e3 * statistics.median(s):.0f} ms" for n, s in timed.items())
        return ClaimSamples(metrics=metrics, details=details, profile=profile)

    def _solved(
        self, context: ExperimentContext, *, quick: bool, one: bool
    ) -> list[dict[str, float]]:
        """Of each batch, predicted seconds of both, and s that it took to decide."""
        from shoal.plan.balance.sequences.flexsp import FlexSP, best_homogeneous
        from shoal.plan.balance.sequences.groups import RankPool

        pool = RankPool(_WORLD, _CAPACITY, ragged.cost_of(32, _FLOPS, _LINKS))
        sizes = np.minimum(ragged.lengths(), _WORLD * _CAPACITY)
        part = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.5 if quick else self.limit_s)
        search = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.0)
        source = np.random.default_rng(context.seed)
        results = []
        count = 4 if quick else self.batches
        for number in range(count):
            context.progress("batches", 0.75 * number / count)
            lengths = source.choice(sizes, self.sequences, replace=False).tolist()
            degree, single = best_homogeneous(lengths, pool)
            begin = time.perf_counter()
            seconds = single if one else part.solve(lengths, pool).seconds
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

    def _elsewhere(self, context: ExperimentContext) -> list[float]:
        """The same of four batches where links between nodes are eight times as fast, by search."""
        from shoal.plan.balance.sequences.flexsp import FlexSP, best_homogeneous
        from shoal.plan.balance.sequences.groups import RankPool

        pool = RankPool(_WORLD, _CAPACITY, ragged.cost_of(32, _FLOPS, ((8, 300e9), (16, 50e9))))
        search = FlexSP(capacity_tokens=_CAPACITY, limit_s=0.0)
        sizes = np.minimum(ragged.lengths(), _WORLD * _CAPACITY)
        source = np.random.default_rng(context.seed)
        results = []
        for _ in range(4):
            lengths = source.choice(sizes, self.sequences, replace=False).tolist()
            single = best_homogeneous(lengths, pool)[1]
            results.append(single / search.solve(lengths, pool).seconds)
        return results
