"""[79] Fuyou: does an optimizer that works during the backward pass make a step shorter?

Source: Liao et al., Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU (Fuyou), 2024.

A decoder of 50 million parameters in a device of 96 MiB, all of its state on a disk that reads and
writes 400 MB/s in total. The baseline is ZeRO-Infinity: its optimizer works after the backward
pass, and what autograd saves waits on the host. Both models are alive and take turns. Then Fuyou
trains with nine amounts of swapped activations, none (all of it is computed again) and all among
them, and its own choice is held against the best of them. The A/A run trains ZeRO-Infinity in
Fuyou's place. The quick run is a small model on the disk as it is, and has no clock.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.experiments.fuyou_runs import Regime
    from shoal.ir.comm import Comm

__all__ = ["FuyouClaim"]

_MIB = 2**20


@part
class FuyouClaim(BaseClaim):
    """Steps beside ZeRO-Infinity's, amounts of swapping, bits and budgets.

    Args:
        device_mib: budget of the device.
        host_mib: budget of the host.
        disk_rate: emulated bytes per second of the disk, each way.
        width: of the model.
        tokens: of a step.
        pairs: rounds, of three steps each.
        amounts: of swapped bytes that are measured.
    """

    device_mib: Annotated[int, Ge(1)] = 96
    host_mib: Annotated[int, Ge(1)] = 160
    disk_rate: Annotated[float, Gt(0)] = 400e6
    width: Annotated[int, MultipleOf(64), Ge(128)] = 1024
    tokens: Annotated[int, Ge(1)] = 512
    pairs: Annotated[int, Ge(1)] = 5
    amounts: Annotated[int, Ge(2)] = 9

    rows: ClassVar[tuple[int, ...]] = (79,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        from shoal.claims.lab.thread_ranks import run_ranks

        with torch_threads(1):
            return run_ranks(
                1, lambda comm: self._run(context, comm, quick=quick, as_baseline=as_baseline)
            )[0]

    def _run(
        self, context: ExperimentContext, comm: Comm, *, quick: bool, as_baseline: bool
    ) -> ClaimSamples:
        from shoal.claims.experiments import fuyou_runs as runs

        place = context.work_dir
        method: Literal["zero_infinity", "fuyou"] = "zero_infinity" if as_baseline else "fuyou"
        small = self._small(context, place)
        metrics, details = self._counted(comm, small, method, steps=4 if quick else 10)
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        regime = runs.Regime(
            runs.wide_lm(self.width, 4, self.tokens),
            self.tokens,
            self.device_mib * _MIB,
            self.host_mib * _MIB,
            self.disk_rate,
            place,
            context.seed,
        )
        profile = self._race(context, comm, regime, method, metrics, details)
        amounts, more = context.remember("amounts", lambda: self._amounts(context, comm, regime))
        metrics.update(amounts)
        details.update(more)
        return ClaimSamples(metrics=metrics, profile=profile, details=details)

    def _small(self, context: ExperimentContext, place: Path) -> Regime:
        """A model whose every bit is compared, on the disk as it is."""
        from shoal.claims.experiments import fuyou_runs as runs

        config = runs.wide_lm(128, 3, 1024)
        return runs.Regime(config, 1024, 256 * _MIB, 28 * _MIB, None, place, context.seed)

    def _counted(
        self,
        comm: Comm,
        regime: Regime,
        method: Literal["zero_infinity", "fuyou"],
        *,
        steps: int,
    ) -> tuple[dict[str, PairedSamples], dict[str, JsonValue]]:
        """Bits and peaks of a small model."""
        from shoal.claims.experiments import fuyou_runs as runs

        with contextlib.closing(runs.FuyouTraining(regime, comm, method)) as training:
            differ = runs.differing(regime, training, steps)
            peaks = training.made.tiers.peaks()
        predicted_bytes = regime.predicted_bytes()
        return {
            "differing_bits": PairedSamples(method=(float(differ),)),
            "host_over_budget": PairedSamples(method=(peaks["host"] / regime.host_bytes,)),
            "peak_over_estimate": PairedSamples(
                method=tuple(peaks[t] / predicted_bytes[t] for t in predicted_bytes)
            ),
        }, {
            "small": {tier: [float(peaks[tier]), predicted_bytes[tier]] for tier in predicted_bytes}
        }

    def _race(
        self,
        context: ExperimentContext,
        comm: Comm,
        regime: Regime,
        method: Literal["zero_infinity", "fuyou"],
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
    ) -> str:
        """Steps of both in turns, and the peaks of the host."""
        from shoal.claims.experiments import fuyou_runs as runs

        result: dict[str, list[float]] = {"method": [], "baseline": []}
        with (
            contextlib.closing(runs.FuyouTraining(regime, comm, "zero_infinity")) as baseline,
            contextlib.closing(runs.FuyouTraining(regime, comm, method)) as training,
        ):
            context.progress("first steps", 0.05)
            ways = {"method": training, "baseline": baseline}
            for way in ways.values():
                way.run(3)
            for turn in range(self.pairs):
                context.progress("steps in turns", 0.1 + 0.4 * turn / self.pairs)
                for name in sorted(ways, reverse=bool(turn % 2)):
                    result[name].append(ways[name].run(3))
            peaks, theirs = training.made.tiers.peaks(), baseline.made.tiers.peaks()
        predicted_bytes = regime.predicted_bytes()
        metrics["step"] = PairedSamples(
            method=tuple(result["method"]), baseline=tuple(result["baseline"])
        )
        metrics["host_over_budget"] = PairedSamples(
            method=(*metrics["host_over_budget"].method, peaks["host"] / regime.host_bytes)
        )
        metrics["baseline_over_budget"] = PairedSamples(
            method=(theirs["host"] / regime.host_bytes,)
        )
        metrics["peak_over_estimate"] = PairedSamples(
            method=(
                *metrics["peak_over_estimate"].method,
                *(peaks[tier] / predicted_bytes[tier] for tier in predicted_bytes),
            )
        )
        details["peaks"] = {tier: float(peak) for tier, peak in peaks.items()}
        details["baseline_peaks"] = {tier: float(peak) for tier, peak in theirs.items()}
        details["told"] = {tier: float(most) for tier, most in predicted_bytes.items()}
        words = 4.0 * sum(p.numel() for p in baseline.made.model.parameters())
        return (
            f"the optimizer reads and writes {3 * words / 1e6:.0f} MB a step, which takes the disk "
            f"{3 * words / self.disk_rate:.2f} s each way, beside {2 * words / 1e6:.0f} MB of "
            "parameters for the passes"
        )

    def _amounts(
        self, context: ExperimentContext, comm: Comm, regime: Regime
    ) -> tuple[dict[str, PairedSamples], dict[str, JsonValue]]:
        """Steps with evenly spread amounts, as predicted and measured; then the choice again."""
        from shoal.claims.experiments import fuyou_runs as runs

        with contextlib.closing(runs.FuyouTraining(regime, comm, "fuyou")) as training:
            training.run(3)
            made = training.fuyou
            assert made.chosen is not None
            assert made.ordered is not None
            chosen, everything = made.chosen.swapped, made.ordered.nbytes[-1]

            def measured(amount: float) -> tuple[float, float]:
                result = made.use(amount).seconds
                training.run(1)
                return result, training.run(2)

            curve: list[tuple[float, float, float]] = []
            for number in range(self.amounts):
                context.progress("amounts", 0.5 + 0.3 * number / self.amounts)
                amount = everything * number / (self.amounts - 1)
                result, seconds = measured(amount)
                curve.append((float(made.chosen.swapped), result, seconds))
            best = min(curve, key=lambda point: point[2])[0]
            pairs: dict[float, list[float]] = {0: [], 1: []}
            for turn in range(self.pairs):
                context.progress("the choice", 0.8 + 0.2 * turn / self.pairs)
                for which in (0, 1) if turn % 2 else (1, 0):
                    made.use((chosen, best)[which])
                    pairs[which].append(training.run(2))
            last = made.use(chosen)
        metrics = {
            "chosen_amount": PairedSamples(method=tuple(pairs[0]), baseline=tuple(pairs[1])),
            "model_error": PairedSamples(
                method=tuple(point[1] for point in curve),
                baseline=tuple(point[2] for point in curve),
            ),
        }
        details: dict[str, JsonValue] = {
            "curve": [
                {"swapped": swapped, "told_s": told, "step_s": seconds}
                for swapped, told, seconds in curve
            ],
            "chosen": float(chosen),
            "best_of_nine": best,
            "binds": list(last.binds),
            "forward_s": dict(last.forward_s),
            "backward_s": dict(last.backward_s),
        }
        return metrics, details
