"""[79] Fuyou: does an optimizer that works during the backward pass make a step shorter?

Source: Liao et al., Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU (Fuyou), 2024.

50 million parameters, a device of 96 MiB, a disk of 400 MB/s in total. The baseline is
ZeRO-Infinity, in turn with Fuyou; then nine amounts of swapped activations, of which Fuyou's own
choice is held against the best. The A/A run trains ZeRO-Infinity; the quick run is small and has no
clock.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.claims.experiments.fuyou_runs import Regime
    from shoal.ir.comm import Comm

    Policy = Literal["zero_infinity", "fuyou"]

_MIB = 2**20


@part
class FuyouClaim(BaseClaim, row=79, needs=("torch",)):
    """Steps beside ZeRO-Infinity's, amounts of swapping, bits and budgets.

    Args:
        device_mib: budget of the device.
        host_mib: budget of the host.
        disk_rate: emulated bytes per second of the disk, each way.
        width: width of the model.
        tokens: tokens of a step.
        pairs: rounds, of three steps each.
        amounts: amounts of swapped bytes that are measured.
    """

    device_mib: Annotated[int, Ge(1)] = 96
    host_mib: Annotated[int, Ge(1)] = 160
    disk_rate: Annotated[float, Gt(0)] = 400e6
    width: Annotated[int, MultipleOf(64), Ge(128)] = 1024
    tokens: Annotated[int, Ge(1)] = 512
    pairs: Annotated[int, Ge(1)] = 5
    amounts: Annotated[int, Ge(2)] = 9

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.lab.thread_ranks import run_ranks

        with torch_threads(1):
            run_ranks(1, lambda comm: self._train(run, comm))

    def _train(self, run: ClaimRun, comm: Comm) -> None:
        from shoal.claims.experiments import fuyou_runs as runs

        method: Policy = run.pick("fuyou", "zero_infinity")
        # A model whose every bit is compared, on the disk as it is.
        small = runs.wide_lm(128, 3, 1024)
        place = run.work_dir
        regime = runs.Regime(small, 1024, 256 * _MIB, 28 * _MIB, None, place, run.seed)
        host_over, over_estimate = self._count(run, comm, regime, method)
        if not run.quick:
            large = runs.wide_lm(self.width, 4, self.tokens)
            budgets = self.device_mib * _MIB, self.host_mib * _MIB
            regime = runs.Regime(large, self.tokens, *budgets, self.disk_rate, place, run.seed)
            peaks = self._race(run, comm, regime, method)
            host_over.append(peaks["host"] / regime.host_bytes)
            predicted = regime.predicted_bytes()
            over_estimate += [peaks[tier] / most for tier, most in predicted.items()]
            amounts = run.remember("amounts", lambda: self._amounts(run, comm, regime))
            for metric, pairs in amounts.items():
                run.put(metric, *pairs)
        run.put("host_over_budget", host_over)
        run.put("peak_over_estimate", over_estimate)

    def _count(
        self, run: ClaimRun, comm: Comm, regime: Regime, method: Policy
    ) -> tuple[list[float], list[float]]:
        """Bits of a small model; its peaks over the host's budget, and over those predicted."""
        from shoal.claims.experiments import fuyou_runs as runs

        with contextlib.closing(runs.FuyouTraining(regime, comm, method)) as training:
            run.put("differing_bits", runs.differing(regime, training, 4 if run.quick else 10))
            peaks = training.made.tiers.peaks()
        predicted = regime.predicted_bytes()
        over = [peaks[tier] / most for tier, most in predicted.items()]
        return [peaks["host"] / regime.host_bytes], over

    def _race(self, run: ClaimRun, comm: Comm, regime: Regime, method: Policy) -> dict[str, int]:
        """Steps of both in turns; peaks of the method's."""
        from shoal.claims.experiments import fuyou_runs as runs

        with (
            contextlib.closing(runs.FuyouTraining(regime, comm, "zero_infinity")) as baseline,
            contextlib.closing(runs.FuyouTraining(regime, comm, method)) as training,
        ):
            run.progress("first steps", 0.05)
            ways = {"method": training, "baseline": baseline}
            for way in ways.values():
                way.run(3)
            run.progress("steps in turns", 0.1)
            result = run.turns({n: partial(way.run, 3) for n, way in ways.items()}, self.pairs)
            peaks, theirs = training.made.tiers.peaks(), baseline.made.tiers.peaks()
        run.put("step", result["method"], result["baseline"])
        run.put("baseline_over_budget", theirs["host"] / regime.host_bytes)
        words = 4.0 * sum(p.numel() for p in baseline.made.model.parameters())
        run.profile = (
            f"the optimizer reads and writes {3 * words / 1e6:.0f} MB a step, which takes the disk "
            f"{3 * words / self.disk_rate:.2f} s each way, beside {2 * words / 1e6:.0f} MB of "
            "parameters for the passes"
        )
        return peaks

    def _amounts(self, run: ClaimRun, comm: Comm, regime: Regime) -> dict[str, Any]:
        """Steps with evenly spread amounts, as predicted and measured; then the choice again."""
        from shoal.claims.experiments import fuyou_runs as runs

        with contextlib.closing(runs.FuyouTraining(regime, comm, "fuyou")) as training:
            training.run(3)
            made = training.fuyou
            assert made.chosen is not None
            assert made.ordered is not None
            chosen, everything = made.chosen.swapped, made.ordered.nbytes[-1]
            swapped, predicted, taken = [], [], []
            for number in range(self.amounts):
                run.progress("amounts", 0.5 + 0.3 * number / self.amounts)
                predicted.append(made.use(everything * number / (self.amounts - 1)).seconds)
                swapped.append(float(made.chosen.swapped))
                training.run(1)
                taken.append(training.run(2))
            best = swapped[taken.index(min(taken))]

            def steps(amount: float) -> float:
                made.use(amount)
                return training.run(2)

            run.progress("the choice", 0.8)
            arms = {"chosen": partial(steps, chosen), "best": partial(steps, best)}
            pairs = run.turns(arms, self.pairs)
        chosen_over_best = pairs["chosen"], pairs["best"]
        return {"chosen_amount": chosen_over_best, "model_error": (predicted, taken)}
