"""[20] ByteScale: does giving every sequence as many ranks as it needs beat a fixed grid?

Source: Ge et al., ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More
Than 12,000 GPUs, 2025.

All files of the standard library as one batch, the longest 16 x 8192 tokens, on 32 described ranks
(400 TFLOP/s, 50 GB/s): predicted seconds and bytes of attention beside dp = 2 x cp = 16 with
best-fit packing, causal work taken as balanced. Two processes: seconds of a step beside cp = 2,
packed or one by one, whichever is faster. Planning for 1,024 ranks; steps beside one process. The
A/A run has the fixed grid.
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

_CAPACITY, _WORLD, _CP = 8192, 32, 16
_FLOPS, _LINK = 400e12, 50e9


@part
class ByteScaleClaim(BaseClaim, row=20, needs=("torch",)):
    """Hybrid data parallelism beside a fixed grid with packing.

    Args:
        documents: documents of the step that two processes make.
        longest: tokens of its longest one.
        turns: number of times that it is timed.
        seeds: ragged batches that are compared with one process.
    """

    documents: Annotated[int, Ge(2)] = 40
    longest: Annotated[int, Ge(2)] = 2048
    turns: Annotated[int, Ge(2)] = 9
    seeds: Annotated[int, Ge(2)] = 4

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.ragged_ranks import errors

        run.progress("thirty-two ranks", 0.02)
        sizes = ragged.lengths()
        scaled = np.maximum(1, np.rint(sizes * (_CP * _CAPACITY / sizes.max()))).astype(np.int64)
        both = [self._simulated(scaled.tolist(), kv, static=run.as_baseline) for kv in (32, 8)]
        for metric, pair in zip(("over_static", "over_static_grouped"), both, strict=True):
            run.put(metric, *(one[0] for one in pair))
        run.put("attention_bytes", *zip(*((a[1], b[1]) for a, b in both), strict=True))
        run.progress("steps beside one process", 0.1)
        batching: dict[str, Any] = run.pick(
            {"name": "bytescale", "capacity_tokens": 12},
            {"name": "packed", "capacity_tokens": 16, "cp": 2},
        )
        seeds = range(run.seed, run.seed + (1 if run.quick else self.seeds))
        run.put("error", errors(batching, seeds))
        if run.quick:
            return
        run.progress("planning for a thousand ranks", 0.2)
        run.put("planning_s", self._planned(scaled, run.seed, static=run.as_baseline))
        run.progress("two real ranks", 0.25)
        chosen = np.random.default_rng(run.seed).choice(scaled, self.documents, replace=False)
        part = {"name": "bytescale", "capacity_tokens": self.longest // 2}
        ragged.race_ranks(run, chosen, self.longest, self.turns, "ring", part)

    def _simulated(
        self, lengths: list[int], kv_heads: int, *, static: bool
    ) -> tuple[tuple[float, float], ...]:
        """Predicted seconds and bytes of one step, of ours and of the grid."""
        from shoal.plan.balance.sequences.bytescale import ByteScale
        from shoal.plan.balance.sequences.packed import PackedAssigner
        from shoal.plan.balance.sequences.predicted import predict

        cost = ragged.cost_of(kv_heads, _FLOPS, ((_WORLD, _LINK),))
        summed = ragged.gradient_s(kv_heads, _WORLD, _LINK)
        grid = PackedAssigner(capacity_tokens=_CAPACITY, cp=_CP)
        theirs = predict(grid.assign(lengths, _WORLD, cost), cost)
        part = grid if static else ByteScale(capacity_tokens=_CAPACITY)
        ours = predict(part.assign(lengths, _WORLD, cost), cost)
        return tuple((one.step_s + summed, one.exchange_bytes) for one in (ours, theirs))

    def _planned(self, scaled: np.ndarray, seed: int, *, static: bool) -> list[float]:
        """Seconds that planning takes, of ten thousand sequences on 1,024 ranks."""
        from shoal.plan.balance.sequences.bytescale import ByteScale
        from shoal.plan.balance.sequences.packed import PackedAssigner

        source = np.random.default_rng(seed)
        cost = ragged.cost_of(32, _FLOPS, ((1024, _LINK),))
        part: Any = ByteScale(capacity_tokens=_CAPACITY)
        if static:
            part = PackedAssigner(capacity_tokens=_CAPACITY, cp=_CP)
        results = []
        for _ in range(self.turns):
            lengths = source.choice(scaled, 10_000).tolist()
            begin = time.perf_counter()
            part.assign(lengths, 1024, cost)
            results.append(time.perf_counter() - begin)
        return results
