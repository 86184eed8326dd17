"""[141] Superpipeline: does a sliding window of blocks save memory at the same output?

Source: Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models, 2024.

A language model of 24 blocks and a vision transformer of 12 run with a window of a third of their
blocks, k = 8 and k' = 2, k = 4 and k' = 1, on a device whose memory an arena counts: weights and
results. Over a link of 2 GB/s the window is timed against one of its size that is replaced as a
whole and waited for, and against single blocks that come when they are needed, as the library
accelerate brings them over the same link. The A/A run keeps all blocks resident for the counts
and takes the window without overlap for the times. One thread computes, one copies.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.memory.streaming.superpipeline import SuperpipelineModel

__all__ = ["SuperpipelineClaim"]

_MODELS = "shoal.claims.experiments.superpipeline_models"
_WINDOWS = {"language": (24, 8, 2), "vision": (12, 4, 1)}


@part
class SuperpipelineClaim(BaseClaim):
    """Windows of a third of the blocks, counted and timed.

    Args:
        hidden: width of both models.
        tokens: of the sequence that the language model reads.
        bytes_per_s: of the emulated link.
        pairs: rounds.
    """

    hidden: Annotated[int, MultipleOf(64), Ge(64)] = 512
    tokens: Annotated[int, Ge(1)] = 96
    bytes_per_s: Annotated[float, Ge(1)] = 2e9
    pairs: Annotated[int, Ge(1)] = 15

    rows: ClassVar[tuple[int, ...]] = (141,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        hidden = 128 if quick else self.hidden
        metrics, details = self._counted(context, hidden, as_baseline)
        context.progress("windows of every size", 0.2)
        falls, peaks = self._rising(context, as_baseline, 4 if quick else 1)
        metrics["peaks_not_rising"] = PairedSamples(method=(float(falls),))
        details["peaks_by_k"] = [float(peak) for peak in peaks]
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        return self._timed(context, metrics, details, as_baseline)

    def _model(self, kind: str, hidden: int, seed: int) -> nn.Module:
        models = importlib.import_module(_MODELS)
        blocks = _WINDOWS[kind][0]
        made: nn.Module = (
            models.language_model(blocks, hidden, seed)
            if kind == "language"
            else models.VisionTransformer(blocks, hidden, seed).eval()
        )
        return made

    def _input(self, kind: str, seed: int) -> Tensor:
        import torch

        source = torch.Generator().manual_seed(seed)
        if kind == "language":
            return torch.randint(0, 512, (1, self.tokens), generator=source)
        return torch.randn(1, 3, 64, 64, generator=source)

    def _counted(
        self, context: ExperimentContext, hidden: int, as_baseline: bool
    ) -> tuple[dict[str, PairedSamples], dict[str, JsonValue]]:
        """Peaks, outputs and loads of both models."""
        metrics: dict[str, PairedSamples] = {}
        details: dict[str, JsonValue] = {}
        wrong, loads = [], []
        for kind, (blocks, k, step) in _WINDOWS.items():
            context.progress(f"counting, {kind} model", 0.05)
            given = self._input(kind, context.seed)
            whole, expected, _, _ = _peak(self._model(kind, hidden, context.seed), given, blocks, 1)
            if as_baseline:
                k, step = blocks, 1
            model = self._model(kind, hidden, context.seed)
            peak, result, each, outcome = _peak(model, given, k, step)
            metrics[f"peak_{kind}"] = PairedSamples(method=(peak,), baseline=(whole,))
            wrong.append(float(not all(map(_equal(expected[0]), [*expected, *result]))))
            loads.append(each / blocks)
            details[kind] = outcome
        metrics["wrong_outputs"] = PairedSamples(method=tuple(wrong))
        metrics["loads_per_block"] = PairedSamples(method=tuple(loads))
        return metrics, details

    def _rising(
        self, context: ExperimentContext, as_baseline: bool, by: int
    ) -> tuple[int, list[int]]:
        """Windows whose peak is not above that of the next smaller one, and all peaks."""
        blocks = _WINDOWS["language"][0]
        model = self._model("language", 64, context.seed)
        given = self._input("language", context.seed)
        windows = [(blocks if as_baseline else k) for k in range(1, blocks + 1, by)]
        peaks = [_peak(model, given, k, max(1, k // 2))[0] for k in windows]
        return sum(b <= a for a, b in itertools.pairwise(peaks)), peaks

    def _timed(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        as_baseline: bool,
    ) -> ClaimSamples:
        import torch

        from shoal.memory.streaming.superpipeline import wrap
        from shoal.memory.tiers.mover import EmulatedLink

        given = self._input("language", context.seed)
        _, k, step = _WINDOWS["language"]
        ways: dict[str, tuple[int, int, bool]] = {
            "method": (k, k, False) if as_baseline else (k, step, True),
            "whole windows": (k, k, False),
            "window at once": (k, k, True),
            "single blocks": (1, 1, True),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        wrapped: list[SuperpipelineModel] = []
        runs: dict[str, Callable[[], object]] = {}
        try:
            for name, (size, moved, overlap) in ways.items():
                context.progress(f"building: {name}", 0.4)
                model = self._model("language", self.hidden, context.seed)
                link = EmulatedLink(self.bytes_per_s)
                wrapped.append(wrap(model, size, moved, device="cpu", link=link, overlap=overlap))
                runs[name] = functools.partial(_forward, model, given)
            resident = self._model("language", self.hidden, context.seed)
            runs["resident"] = functools.partial(_forward, resident, given)
            skipped: dict[str, str] = {}
            if importlib.util.find_spec("accelerate") is None:
                skipped["over_single_blocks"] = "accelerate is not installed"
            else:
                models = importlib.import_module(_MODELS)
                peer = models.accelerated(
                    self._model("language", self.hidden, context.seed),
                    EmulatedLink(self.bytes_per_s),
                )
                runs["accelerate"] = functools.partial(_forward, peer, given)
            context.progress("timing", 0.6)
            times = interleave(runs, self.pairs, warmup=2, seed=context.seed)
        finally:
            for one in wrapped:
                one.close()
            torch.set_num_threads(threads)
        seconds = times.seconds
        metrics["over_whole_windows"] = PairedSamples(
            method=seconds["method"], baseline=seconds["whole windows"]
        )
        peers = {}
        if not skipped:
            metrics["over_single_blocks"] = PairedSamples(
                method=seconds["method"], baseline=seconds["single blocks"]
            )
            peers["over_single_blocks"] = PairedSamples(
                method=tuple(1 / s for s in seconds["single blocks"]),
                baseline=tuple(1 / s for s in seconds["accelerate"]),
            )
        medians = {name: times.median(name).value for name in seconds}
        blocks_bytes = sum(wrapped[0].report.block_bytes)
        floor = max(medians["resident"], blocks_bytes / self.bytes_per_s)
        details["seconds"] = dict(medians)
        details["link_s"] = blocks_bytes / self.bytes_per_s
        return ClaimSamples(
            metrics=metrics,
            skipped=skipped,
            bounds={
                "over_whole_windows": medians["whole windows"] / floor,
                "over_single_blocks": medians["single blocks"] / floor,
            },
            peers=peers,
            profile=", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in medians.items()),
            details=details,
        )


def _forward(model: nn.Module, given: Tensor) -> Tensor:
    import torch

    with torch.inference_mode():
        tensor: Tensor = model(given)
        return tensor


def _equal(expected: Tensor) -> Callable[[Tensor], bool]:
    import torch

    return functools.partial(torch.equal, expected)


def _peak(
    model: nn.Module, given: Tensor, k: int, k_prime: int
) -> tuple[int, list[Tensor], int, JsonValue]:
    """Three passes on a counted device: peak bytes, outputs, loads of the last pass, the report."""
    from shoal.memory.streaming.superpipeline import wrap
    from shoal.memory.tiers.device import DeviceScope
    from shoal.memory.tiers.tier import BudgetedTier

    tier = BudgetedTier("device", 2**31)
    with wrap(model, k, k_prime, tier=tier) as wrapped:
        results: list[Any] = []
        loads = 0
        for _ in range(3):
            before = wrapped.stats.loads
            here = given.clone()
            with DeviceScope(tier) as scope:
                scope.adopt(here)
                out = _forward(model, here)
            results.append(out.clone())
            loads = wrapped.stats.loads - before
            del out, here
        return tier.stats.peak, results, loads, str(wrapped.report)
