"""[20] ByteScale: does giving every sequence as many ranks as it needs beat a fixed grid?

Source: Ge et al., ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More
Than 12,000 GPUs, 2025.

- One batch of all files of the standard library, lengths scaled so that the longest has 16 C tokens
  with C = 8192, on 32 ranks of 400 TFLOP/s and 50 GB/s and a model 4096 wide: predicted seconds and
  bytes of attention, beside dp = 2 x cp = 16 with packing. Both with the sum of the gradients; the
  baseline's causal work is taken to be balanced in every buffer, and its packing is best-fit.
- Two processes and forty documents: seconds of a step beside cp = 2 for all, packed or one after
  another, whichever is faster.
- Ten thousand sequences on 1,024 ranks: seconds of planning.
- Training steps of ragged batches beside one process.

The A/A run has the fixed grid.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments import ragged
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

__all__ = ["ByteScaleClaim"]

_CAPACITY, _WORLD, _CP = 8192, 32, 16
_FLOPS, _LINK = 400e12, 50e9


@part
class ByteScaleClaim(BaseClaim):
    """Hybrid data parallelism beside a fixed grid with packing.

    Args:
        documents: of the step that two processes make.
        longest: tokens of its longest one.
        turns: how often it is timed.
        seeds: ragged batches that are compared with one process.
    """

    documents: Annotated[int, Ge(2)] = 40
    longest: Annotated[int, Ge(2)] = 2048
    turns: Annotated[int, Ge(2)] = 9
    seeds: Annotated[int, Ge(2)] = 4

    rows: ClassVar[tuple[int, ...]] = (20,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.ragged_ranks import errors

        run.progress("thirty-two ranks", 0.02)
        sizes = ragged.lengths()
        scaled = np.maximum(1, np.rint(sizes * (_CP * _CAPACITY / sizes.max()))).astype(np.int64)
        plain = self._simulated(scaled.tolist(), 32, static=run.as_baseline)
        grouped = self._simulated(scaled.tolist(), 8, static=run.as_baseline)
        run.put("over_static", plain["step_s"], plain["static_s"])
        run.put("over_static_grouped", grouped["step_s"], grouped["static_s"])
        sent = [[one[key] for one in (plain, grouped)] for key in ("bytes", "static_bytes")]
        run.put("attention_bytes", *sent)
        run.progress("steps beside one process", 0.1)
        batching: dict[str, Any] = run.pick(
            {"name": "bytescale", "capacity_tokens": 12},
            {"name": "packed", "capacity_tokens": 16, "cp": 2},
        )
        seeds = range(run.seed, run.seed + (1 if run.quick else self.seeds))
        run.put("error", errors(batching, seeds))
        run.details |= {
            "sequences": len(sizes),
            "tokens": int(scaled.sum()),
            "plain": plain,
            "grouped": grouped,
        }
        if run.quick:
            return
        run.progress("planning for a thousand ranks", 0.2)
        run.put("planning_s", self._planned(scaled, run.seed, static=run.as_baseline))
        run.progress("two real ranks", 0.25)
        chosen = np.random.default_rng(run.seed).choice(scaled, self.documents, replace=False)
        part = {"name": "bytescale", "capacity_tokens": self.longest // 2}
        ragged.race_ranks(run, chosen, self.longest, self.turns, "ring", part)

    def _simulated(self, lengths: list[int], kv_heads: int, *, static: bool) -> dict[str, float]:
        """Predicted seconds and bytes of one step, of both."""
        from shoal.plan.balance.sequences.bytescale import ByteScale
        from shoal.plan.balance.sequences.packed import PackedAssigner
        from shoal.plan.balance.sequences.predicted import predict

        cost = ragged.cost_of(kv_heads, _FLOPS, ((_WORLD, _LINK),))
        summed = ragged.gradient_s(kv_heads, _WORLD, _LINK)
        grid = PackedAssigner(capacity_tokens=_CAPACITY, cp=_CP)
        theirs = predict(grid.assign(lengths, _WORLD, cost), cost)
        part = grid if static else ByteScale(capacity_tokens=_CAPACITY)
        ours = predict(part.assign(lengths, _WORLD, cost), cost)
        return {
            "step_s": ours.step_s + summed,
            "static_s": theirs.step_s + summed,
            "gradients_s": summed,
            "bytes": ours.exchange_bytes,
            "static_bytes": theirs.exchange_bytes,
            "idle_share": ours.idle_share,
            "static_idle_share": theirs.idle_share,
        }

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
