"""[64] ZeRO-Infinity: do models train whose state is many times the device's memory?

Source: Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning, 2021.

A decoder in budgets of 64 MiB on the device and 256 MiB on the host, counted operator by operator.
The baseline of the size is PyTorch on the device; of the fetch, one rank that has a whole
parameter; of the overlap, no fetching ahead. The A/A run puts each baseline in place; the quick run
has an eighth of the budgets and no clock.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated

from annotated_types import Ge, Gt, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.kernel.threads import torch_threads

_MIB = 2**20
# Elements fetched ahead: fewer than a layer has, so that both runs read the same.
_AHEAD = 3 * 10**6


@part
class ZeroInfinityClaim(BaseClaim, row=64, needs=("torch",)):
    """Sizes, fetches, overlap and predicted peaks.

    Args:
        device_mib: budget of the device.
        host_mib: budget of the host.
        widest: largest width that is tried.
        disk_rate: emulated bytes per second of each rank's disk, for the fetches.
        width: width of the model whose fetches and overlap are measured.
        pairs: rounds.
    """

    device_mib: Annotated[int, Ge(1)] = 64
    host_mib: Annotated[int, Ge(1)] = 256
    widest: Annotated[int, MultipleOf(64), Ge(128)] = 1536
    disk_rate: Annotated[float, Gt(0)] = 100e6
    width: Annotated[int, MultipleOf(64), Ge(128)] = 512
    pairs: Annotated[int, Ge(1)] = 9

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        with torch_threads(1):
            self._sizes(run)
            if run.quick:
                return
            run.progress("fetches of two ranks", 0.5)
            self._fetches(run)
            run.progress("overlap", 0.7)
            self._overlap(run)
        run.bounds |= {"fetch": 2.0, "overlap": 2.0}

    def _sizes(self, run: ClaimRun) -> None:
        """The largest models that train three steps, and their peaks beside the predicted."""
        from shoal.claims.experiments import zero_infinity_runs as runs

        share = 8 if run.quick else 1
        budgets = runs.Budgets(self.device_mib * _MIB // share, self.host_mib * _MIB // share)
        seed, place = run.seed, run.work_dir

        def largest_plain() -> runs.OffloadRunResult:
            best: runs.OffloadRunResult | None = None
            for width in range(64, self.widest + 1, 64):
                made = runs.plain(runs.model_of(width), budgets.device, steps=3, seed=seed)
                if made is None:
                    break
                best = made
            assert best is not None
            return best

        def largest_streamed() -> runs.OffloadRunResult:
            widest = int(self.widest / math.sqrt(share)) // 128 * 128
            for width in range(widest, 0, -128):
                run.progress(f"{width} wide", 0.2)
                made = runs.streamed(
                    runs.model_of(width), budgets, place, steps=3, seed=seed,
                    prefetch_numel=10**5, sub_group_numel=10**6 // share, tiles=0,
                )  # fmt: skip
                if made is not None:
                    return made
            raise AssertionError("no width fits")

        run.progress("plain training", 0.05)
        plain = run.remember(f"plain {share}", largest_plain)
        best = plain if run.as_baseline else largest_streamed()
        run.put("parameters", best.parameters, plain.parameters)
        run.put("state_over_device", 16.0 * best.parameters / budgets.device)
        small = runs.model_of(128)
        steps = 20
        one = runs.plain(small, 2**30, steps=steps, seed=seed, keep=True)
        two = runs.streamed(
            small, runs.Budgets(2**24, 2**26), place, steps=steps, seed=seed, keep=True
        )
        assert one is not None
        assert two is not None
        differ = sum(int((two.values[n] != value).sum()) for n, value in one.values.items())
        run.put("differing_bits", differ)
        errors, over = [], []
        # Widths and lengths such that each of the formula's moments is the largest once.
        source = generator(seed, purpose="zero infinity peaks")
        chosen = ((256, 512), (128, 256)) if run.quick else ((128, 256), (256, 128), (256, 512))
        for width, tokens in chosen:
            ahead = int(source.integers(0, 2)) * 10**7
            made = runs.streamed(
                runs.model_of(width), runs.Budgets(2**27, 2**27), place, steps=2, seed=seed,
                tokens=tokens, prefetch_numel=ahead,
            )  # fmt: skip
            assert made is not None
            result = made.peaks
            if run.as_baseline:
                whole = runs.plain(runs.model_of(width), 2**30, steps=2, seed=seed)
                assert whole is not None
                result = {**result, **whole.peaks}
            for tier, predicted in made.predicted.items():
                errors.append(abs(result[tier] / predicted - 1))
                over.append(result[tier] / predicted)
        run.put("peak_error", errors)
        run.put("peak_over_estimate", over)

    def _fetches(self, run: ClaimRun) -> None:
        """Seconds until parameters are there: both ranks read a part, or one reads all."""
        from shoal.claims.experiments import zero_infinity_runs as runs

        def measured(*, owner: bool) -> tuple[float, ...]:
            return runs.fetch_seconds(
                runs.model_of(self.width), run.work_dir, owner=owner,
                bytes_per_s=self.disk_rate, rounds=self.pairs,
            )  # fmt: skip

        run.put("fetch", measured(owner=run.as_baseline), measured(owner=True))

    def _overlap(self, run: ClaimRun) -> None:
        """Seconds of steps, fetched ahead or not, where computing takes as long as reading."""
        from shoal.claims.experiments import zero_infinity_runs as runs
        from shoal.memory.tiers.mover import EmulatedLink

        config, tokens = runs.model_of(self.width), 128

        def step(ahead: int, links: dict[str, EmulatedLink], steps: int) -> runs.OffloadRunResult:
            made = runs.streamed(
                config, runs.Budgets(2**29, 2**29), run.work_dir, steps=steps, seed=run.seed,
                prefetch_numel=ahead, optim="host", tokens=tokens, links=links,
            )  # fmt: skip
            assert made is not None
            return made

        free = step(_AHEAD, {}, 4)
        twice = 2 * 4.0 * free.parameters
        rate = twice / min(free.seconds[1:])

        def last_s(ahead: int) -> float:
            return step(ahead, {"read": EmulatedLink(rate)}, 3).seconds[-1]

        aheads = run.arms({"method": _AHEAD, "baseline": 0})
        arms = {name: functools.partial(last_s, ahead) for name, ahead in aheads.items()}
        result = run.turns(arms, self.pairs)
        run.put("overlap", result["method"], result["baseline"])
        run.profile = (
            f"a step takes {min(free.seconds[1:]):.3f} s without waiting; the disk reads "
            f"{rate / 1e6:.0f} MB/s"
        )
