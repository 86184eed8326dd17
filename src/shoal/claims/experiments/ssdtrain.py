"""[99] SSDTrain: does sending what autograd saves to a disk halve its peak at the same speed?

Source: Wu et al., SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language
Model Training, 2024.

A decoder of 6 blocks and 256 channels whose saved tensors take more than 200 MiB. Three ways take
turns: kept, computed again, or sent to this machine's disk past the cache of pages. An arena counts
every tensor of a step. One thread computes, the other core moves. The A/A run keeps.
"""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.bench.activations import ActivationSetup

_WARM = 3


@part
class SSDTrainClaim(BaseClaim, row=99, needs=("torch",)):
    """What is saved kept, computed again, and on a disk.

    Args:
        sequences: sequences of a step.
        length: tokens of a sequence.
        hidden: width of the model.
        pairs: rounds.
    """

    sequences: Annotated[int, Ge(1)] = 4
    length: Annotated[int, Ge(1)] = 256
    hidden: Annotated[int, MultipleOf(64), Ge(64)] = 256
    pairs: Annotated[int, Ge(1)] = 21

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
        if run.quick:
            return
        run.progress("timing", 0.4)
        pairs = {"step_time": ("ssdtrain", "keep"), "over_recompute": ("ssdtrain", "recompute")}
        seconds = run.versus({n: way.step for n, way in ways.items()}, pairs, self.pairs, warmup=1)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        run.bounds |= {"step_time": 1.0, "over_recompute": medians["recompute"] / medians["keep"]}
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
