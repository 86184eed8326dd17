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

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.bench.activations import ActivationSetup
    from shoal.memory.activations.cache import TensorCache

__all__ = ["SSDTrainClaim"]

_WARM = 3
_VOCABULARY = 256


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

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        with torch_threads(1):
            return self._run(context, quick, as_baseline)

    def _run(self, context: ExperimentContext, quick: bool, as_baseline: bool) -> ClaimSamples:
        ways = {
            name: self._way(context, name, waits=quick)
            for name in ("keep", "recompute", "ssdtrain")
        }
        method = ways["keep" if as_baseline else "ssdtrain"]
        context.progress("warming up", 0.05)
        for way in ways.values():
            for _ in range(_WARM):
                way.step()
        context.progress("counting", 0.2)
        peaks = {name: way.peak() for name, way in ways.items()}
        mine = method.peak()
        wrong = sum(
            not _equal(a.grad, b.grad)
            for a, b in zip(method.model.parameters(), ways["keep"].model.parameters(), strict=True)
        )
        left = len(list(Path(context.work_dir).rglob("*tier*")))
        cache = ways["ssdtrain"].cache
        assert cache is not None
        left += cache.disk.stats.used
        metrics = {
            "peak": PairedSamples(method=(float(mine),), baseline=(float(peaks["keep"]),)),
            "wrong_gradients": PairedSamples(method=(float(wrong),)),
            "left_behind": PairedSamples(method=(float(left),)),
        }
        details: dict[str, JsonValue] = {
            "peak_bytes": {name: float(peak) for name, peak in peaks.items()},
            "cut": None if cache.cut is None else list(cache.cut),
            "direct": cache.disk.direct,
        }
        if quick:
            _close(ways)
            return ClaimSamples(metrics=metrics, details=details)
        from shoal.memory.activations.ssdtrain import lifetime_years

        context.progress("timing", 0.4)
        before = cache.stats.written_bytes, cache.stats.stall_s, cache.stats.forwarded
        runs: dict[str, Callable[[], object]] = {n: way.step for n, way in ways.items()}
        if as_baseline:
            # The baseline in the method's place: the same steps under another name.
            runs["ssdtrain"] = self._way(context, "keep").step
        times = interleave(runs, self.pairs, warmup=1, seed=context.seed)
        seconds = times.seconds
        metrics["step_time"] = PairedSamples(method=seconds["ssdtrain"], baseline=seconds["keep"])
        metrics["over_recompute"] = PairedSamples(
            method=seconds["ssdtrain"], baseline=seconds["recompute"]
        )
        medians = {name: times.median(name).value for name in seconds}
        steps = self.pairs + 1
        written = (cache.stats.written_bytes - before[0]) / steps
        details["seconds"] = dict(medians)
        details["written_bytes_a_step"] = written
        details["stall_s_a_step"] = (cache.stats.stall_s - before[1]) / steps
        details["forwarded_a_step"] = (cache.stats.forwarded - before[2]) / steps
        if written:
            details["years_of_600_tb"] = lifetime_years(600e12, written, medians["ssdtrain"])
        _close(ways)
        return ClaimSamples(
            metrics=metrics,
            bounds={"over_recompute": medians["recompute"] / medians["keep"], "step_time": 1.0},
            profile=", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in medians.items()),
            details=details,
        )

    def _way(
        self, context: ExperimentContext, name: str, *, waits: bool = False
    ) -> ActivationSetup:
        from shoal.claims.bench.activations import way
        from shoal.memory.activations.ssdtrain import SSDTrain
        from shoal.model.config import ModelConfig

        config = ModelConfig(
            name="claim",
            vocab_size=_VOCABULARY,
            hidden=self.hidden,
            ffn_hidden=4 * self.hidden,
            num_layers=6,
            num_heads=self.hidden // 64,
            num_kv_heads=self.hidden // 64,
            head_dim=64,
            max_position=self.length,
        )
        disk = SSDTrain(path=str(context.work_dir), adaptive=not waits)
        made = way(name, config, self.sequences, self.length, disk, context.seed)
        if waits and made.cache is not None:
            for block in made.model.blocks:
                block.register_forward_hook(functools.partial(_written, made.cache))
        return made


def _written(cache: TensorCache, *_: Any) -> None:
    cache.written()


def _close(ways: dict[str, ActivationSetup]) -> None:
    for way in ways.values():
        if way.cache is not None:
            way.cache.close()


def _equal(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a, b)
