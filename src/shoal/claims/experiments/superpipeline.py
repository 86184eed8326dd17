"""[141] Superpipeline: does a sliding window of blocks save memory at the same output?

Source: Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models, 2024.

24 blocks of language and 12 of vision, windows of a third (k = 8 and k' = 2, k = 4 and k' = 1), on
a device whose memory an arena counts. Over a link of 2 GB/s beside a window replaced as a whole,
and beside blocks that come when needed, as the library accelerate has them. The A/A run keeps all
blocks resident, and takes the window without overlap for the times.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from torch import Tensor, nn

_MODELS = "shoal.claims.experiments.superpipeline_models"
_WINDOWS = {"language": (24, 8, 2), "vision": (12, 4, 1)}


@part
class SuperpipelineClaim(BaseClaim, row=141, needs=("torch",)):
    """Windows of a third of the blocks, counted and timed.

    Args:
        hidden: width of both models.
        tokens: tokens of the sequence that the language model reads.
        bytes_per_s: bandwidth of the emulated link, byte/s.
        pairs: rounds.
    """

    hidden: Annotated[int, MultipleOf(64), Ge(64)] = 512
    tokens: Annotated[int, Ge(1)] = 96
    bytes_per_s: Annotated[float, Ge(1)] = 2e9
    pairs: Annotated[int, Ge(1)] = 15

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        self._count(run, 128 if run.quick else self.hidden)
        run.progress("windows of every size", 0.2)
        self._rise(run, 4 if run.quick else 1)
        if not run.quick:
            with torch_threads(1), contextlib.ExitStack() as stack:
                self._time(run, stack)

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

    def _count(self, run: ClaimRun, hidden: int) -> None:
        """Peaks, outputs and loads of both models."""
        import torch

        wrong, loads = [], []
        for kind, (blocks, k, step) in _WINDOWS.items():
            run.progress(f"counting, {kind} model", 0.05)
            given = self._input(kind, run.seed)
            whole, expected, _ = _peak(self._model(kind, hidden, run.seed), given, blocks, 1)
            window = run.pick((k, step), (blocks, 1))
            peak, result, each = _peak(self._model(kind, hidden, run.seed), given, *window)
            run.put(f"peak_{kind}", peak, whole)
            wrong.append(not all(torch.equal(expected[0], out) for out in [*expected, *result]))
            loads.append(each / blocks)
        run.put("wrong_outputs", wrong)
        run.put("loads_per_block", loads)

    def _rise(self, run: ClaimRun, by: int) -> None:
        """Windows whose peak is not above that of the next smaller one, and all peaks."""
        blocks = _WINDOWS["language"][0]
        model = self._model("language", 64, run.seed)
        given = self._input("language", run.seed)
        windows = [run.pick(k, blocks) for k in range(1, blocks + 1, by)]
        peaks = [_peak(model, given, k, max(1, k // 2))[0] for k in windows]
        run.put("peaks_not_rising", sum(b <= a for a, b in itertools.pairwise(peaks)))

    def _time(self, run: ClaimRun, stack: contextlib.ExitStack) -> None:
        from shoal.memory.streaming.superpipeline import wrap
        from shoal.memory.tiers.mover import EmulatedLink

        given = self._input("language", run.seed)
        _, k, step = _WINDOWS["language"]
        ways: dict[str, tuple[int, int, bool]] = {
            "method": (k, step, True),
            "whole windows": (k, k, False),
            "window at once": (k, k, True),
            "single blocks": (1, 1, True),
        }
        runs: dict[str, Callable[[], object]] = {}
        nbytes = 0
        for name, (size, moved, overlap) in run.arms(ways, {"method": "whole windows"}).items():
            run.progress(f"building: {name}", 0.4)
            model = self._model("language", self.hidden, run.seed)
            link = EmulatedLink(self.bytes_per_s)
            one = wrap(model, size, moved, device="cpu", link=link, overlap=overlap)
            stack.callback(one.close)
            nbytes = sum(one.report.block_bytes)
            runs[name] = functools.partial(_forward, model, given)
        resident = self._model("language", self.hidden, run.seed)
        runs["resident"] = functools.partial(_forward, resident, given)
        if importlib.util.find_spec("accelerate") is None:
            run.skip("accelerate is not installed", "over_single_blocks")
        else:
            models = importlib.import_module(_MODELS)
            peer = models.accelerated(
                self._model("language", self.hidden, run.seed), EmulatedLink(self.bytes_per_s)
            )
            runs["accelerate"] = functools.partial(_forward, peer, given)
        run.progress("timing", 0.6)
        seconds = run.race(runs, self.pairs, swaps={})
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        floor = max(medians["resident"], nbytes / self.bytes_per_s)
        for metric, way in (
            ("over_whole_windows", "whole windows"),
            ("over_single_blocks", "single blocks"),
        ):
            run.bounds[metric] = medians[way] / floor
            if metric not in run.skipped:
                run.put(metric, seconds["method"], seconds[way])
        if not run.skipped:
            run.put_peer("over_single_blocks", seconds["single blocks"], seconds["accelerate"])
        run.profile = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in medians.items())


def _forward(model: nn.Module, given: Tensor) -> Tensor:
    import torch

    with torch.inference_mode():
        tensor: Tensor = model(given)
        return tensor


def _peak(model: nn.Module, given: Tensor, k: int, k_prime: int) -> tuple[int, list[Tensor], int]:
    """Three passes on a counted device: peak bytes, outputs, loads of the last pass."""
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
        return tier.stats.peak, results, loads
