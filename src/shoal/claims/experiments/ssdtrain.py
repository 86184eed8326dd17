"""[99] SSDTrain: does sending what autograd saves to a disk halve its peak at the same speed?

Source: Wu et al., SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language
Model Training, 2024.

A decoder of 6 blocks and 256 channels trains on enough sequences that what is saved takes more than
200 MiB. Three ways take turns: it is kept, every block is computed again, or it goes to this
machine's disk past the cache of pages and comes back. An arena counts every tensor that a step
makes; weights and gradients are made before. One thread computes, the other core moves. The A/A
run keeps.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.bench.activations import ActivationSetup

__all__ = ["SSDTrainClaim"]

_WARM = 3


@part
class SSDTrainClaim(BaseClaim):
    """What is saved kept, computed again, and on a disk.

    Args:
        sequences: of a step.
        length: tokens of a sequence.
        hidden: width of the model.
        pairs: rounds.
    """

    sequences: Annotated[int, Ge(1)] = 4
    length: Annotated[int, Ge(1)] = 256
    hidden: Annotated[int, MultipleOf(64), Ge(64)] = 256
    pairs: Annotated[int, Ge(1)] = 21

    rows: ClassVar[tuple[int, ...]] = (99,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        with torch_threads(1), contextlib.ExitStack() as stack:
            self._steps(run, stack)

    def _steps(self, run: ClaimRun, stack: contextlib.ExitStack) -> None:
        import torch

        ways = {
            name: self._way(run.context, name, waits=run.quick)
            for name in ("keep", "recompute", "ssdtrain")
        }
        cache = ways["ssdtrain"].cache
        assert cache is not None
        stack.callback(cache.close)
        method = ways[run.pick("ssdtrain", "keep")]
        run.progress("warming up", 0.05)
        for way in ways.values():
            for _ in range(_WARM):
                way.step()
        run.progress("counting", 0.2)
        peaks = {name: way.peak() for name, way in ways.items()}
        run.put("peak", method.peak(), peaks["keep"])
        both = zip(method.model.parameters(), ways["keep"].model.parameters(), strict=True)
        wrong = sum(
            a.grad is None or b.grad is None or not torch.equal(a.grad, b.grad) for a, b in both
        )
        run.put("wrong_gradients", wrong)
        left = len(list(Path(run.work_dir).rglob("*tier*")))
        run.put("left_behind", left + cache.disk.stats.used)
        run.details |= {
            "peak_bytes": {name: float(peak) for name, peak in peaks.items()},
            "cut": cache.cut,
            "direct": cache.disk.direct,
        }
        if run.quick:
            return
        from shoal.memory.activations.ssdtrain import lifetime_years

        run.progress("timing", 0.4)
        before = cache.stats.written_bytes, cache.stats.stall_s, cache.stats.forwarded
        runs: dict[str, Callable[[], object]] = {n: way.step for n, way in ways.items()}
        if run.as_baseline:
            # The baseline in the method's place: the same steps of another model.
            runs["ssdtrain"] = self._way(run.context, "keep").step
        seconds = run.race(runs, self.pairs, warmup=1, swaps={})
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        run.put("step_time", seconds["ssdtrain"], seconds["keep"], bound=1.0)
        bound = medians["recompute"] / medians["keep"]
        run.put("over_recompute", seconds["ssdtrain"], seconds["recompute"], bound=bound)
        steps = self.pairs + 1
        written = (cache.stats.written_bytes - before[0]) / steps
        run.details |= {
            "seconds": medians,
            "written_bytes_a_step": written,
            "stall_s_a_step": (cache.stats.stall_s - before[1]) / steps,
            "forwarded_a_step": (cache.stats.forwarded - before[2]) / steps,
        }
        if written:
            years = lifetime_years(600e12, written, medians["ssdtrain"])
            run.details["years_of_600_tb"] = years
        run.profile = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in medians.items())

    def _way(
        self, context: ExperimentContext, name: str, *, waits: bool = False
    ) -> ActivationSetup:
        from shoal.claims.bench.activations import way
        from shoal.memory.activations.ssdtrain import SSDTrain

        hidden = self.hidden
        config = llama(hidden, 6, hidden // 64, ffn=4 * hidden, length=self.length)
        disk = SSDTrain(path=str(context.work_dir), adaptive=not waits)
        made = way(name, config, self.sequences, self.length, disk, context.seed)
        if waits and made.cache is not None:
            for block in made.model.blocks:
                block.register_forward_hook(lambda *_, cache=made.cache: cache.written())
        return made
