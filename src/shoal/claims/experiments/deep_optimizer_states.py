"""[51] DeepOptimizerStates: does the device help the host to update, sub-group by sub-group?

Source: Maurya et al., Deep Optimizer States, 2024.

Host and device are threads on a core each; their copies and the host are held to rates, because two
equal cores are no real server. With three rates of the link every stride is measured beside the
host alone. What two equal cores gain without any of this is reported as well. The A/A run has the
host alone. The timeline of a published machine is played, not run.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.plan.memory.stride import (
    HOST_ONLY,
    UpdatePattern,
    UpdateRates,
    choose,
    timeline,
)
from shoal.train.optimizers.adamw import AdamW

if TYPE_CHECKING:
    from shoal.memory.offload.interleaved import InterleavedUpdater, Workers

# Host 1.5, device 25, conversion 8 and link 12 billion parameters or words a second: H100 class.
_PUBLISHED = UpdateRates(host=1.5e9, device=25e9, convert=8e9, link=12e9)
_STRIDES = (2, 3, 4, 5, 6)
# From most on the device to nothing there: how far a choice is from the best is counted in this.
_ORDER = (*_STRIDES, HOST_ONLY)
_WANTED = (2, 3, 4)
_EXACT_STEPS = 10


@part
class DeepOptimizerStatesClaim(BaseClaim, row=51, needs=("torch",), cores=2):
    """Updates of bf16 weights with an fp32 state on the host.

    Args:
        sub_group: parameters of a sub-group.
        groups: sub-groups.
        host_rate: parameters that the host updates in a second.
        pairs: rounds.
    """

    sub_group: Annotated[int, Ge(1)] = 250_000
    groups: Annotated[int, Ge(1)] = 24
    host_rate: Annotated[float, Ge(1)] = 3e7
    pairs: Annotated[int, Ge(1)] = 11

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("ten exact steps", 0.02)
        wrong, share = _exact(run.seed, run.as_baseline)
        best, played = choose(_PUBLISHED, [10**8] * 20)
        run.put("wrong_numbers", wrong)
        run.put("state_over_slots", share)
        alone = played[0].seconds
        run.put("published_update", run.pick(best.seconds, alone), alone)
        if run.quick:
            return
        from shoal.memory.offload.interleaved import Workers, rates_of
        from shoal.memory.tiers.mover import EmulatedLink

        pace = Workers(cores=(0, 1), host_rate=self.host_rate)
        rates = run.remember("rates", lambda: rates_of(self.sub_group, AdamW(fused=False), pace))
        off, said = [], []
        for index, wanted in enumerate(_WANTED):
            run.progress(f"a link for a stride of {wanted}", 0.1 + 0.25 * index)
            words = _link_for(rates, self.sub_group, wanted)
            there = rates.model_copy(update={"link": words})
            link = EmulatedLink(4 * words)
            workers = Workers(cores=(0, 1), host_rate=self.host_rate, link=link)
            sizes = [self.sub_group] * self.groups
            predicted = {
                stride: timeline(there, sizes, _pattern(sizes, stride)).seconds for stride in _ORDER
            }
            auto = min(_ORDER, key=lambda stride: predicted[stride])
            timed = self._race(
                run, {str(s): (workers, run.pick(s, HOST_ONLY), False) for s in _ORDER}
            )
            medians = {stride: statistics.median(timed[str(stride)]) for stride in _ORDER}
            fastest = min(_ORDER, key=lambda stride: medians[stride])
            off.append(abs(_ORDER.index(auto) - _ORDER.index(fastest)))
            if wanted == 2:
                bound = predicted_limit(rates)
                run.put("update", timed[str(auto)], timed[str(HOST_ONLY)], bound=bound)
            said.append(
                f"link {words / 1e6:.0f} M words/s: chosen {_named(auto)}, best {_named(fastest)}, "
                f"{medians[HOST_ONLY] / medians[auto]:.2f}x the host alone, predicted "
                f"{predicted[HOST_ONLY] / predicted[auto]:.2f}x"
            )
        run.put("stride_off", off)
        run.progress("two equal cores", 0.9)
        equal = self._equal_cores(run)
        said.append(f"two equal cores and no rate held: {equal:.2f}x the host alone")
        run.profile = "; ".join(said)

    def _race(
        self,
        run: ClaimRun,
        updaters: Mapping[str, tuple[Workers, int, bool]],
        *,
        threads: int = 0,
        **others: Callable[[], object],
    ) -> Mapping[str, tuple[float, ...]]:
        """Seconds of updates: by workers, stride, and whether the host's rule is a fused one."""
        made = {name: self._made(*one) for name, one in updaters.items()}
        arms = {name: functools.partial(_update, one) for name, one in made.items()}
        timed = run.race({**arms, **others}, self.pairs, swaps={}, threads=threads)
        for one in made.values():
            one.close()
        return timed

    def _made(self, workers: Workers, stride: int, fused: bool) -> InterleavedUpdater:
        import torch

        from shoal.memory.offload.interleaved import InterleavedUpdater
        from shoal.memory.tiers.tier import BudgetedTier

        total = self.sub_group * self.groups
        made = InterleavedUpdater(
            {"weights": torch.zeros(1, total, dtype=torch.bfloat16)},
            AdamW(fused=fused),
            sub_group=self.sub_group,
            pattern=lambda sizes: _pattern(sizes, stride),
            device=BudgetedTier("device", 8 * total + 24 * self.sub_group + 2**20),
            host=BudgetedTier("host", 16 * total + 2**20),
            workers=workers,
        )
        made.zero_gradients()
        return made

    def _equal_cores(self, run: ClaimRun) -> float:
        """What interleaving gains where nothing is held to a rate; and our baseline's peer."""
        import torch

        from shoal.memory.offload.interleaved import Workers

        plain, total = Workers(cores=(0, 1)), self.sub_group * self.groups
        master = torch.zeros(total)
        master.grad = torch.zeros(total)
        narrow = torch.zeros(total, dtype=torch.bfloat16)
        torchs = torch.optim.AdamW([master], lr=1e-3, foreach=False, fused=False)

        def by_torch() -> None:
            torchs.step()
            narrow.copy_(master)

        updaters = {
            "host": (plain, HOST_ONLY, True),
            "both": (plain, run.pick(2, HOST_ONLY), True),
            "single": (plain, HOST_ONLY, False),
        }
        timed = self._race(run, updaters, threads=1, torch=by_torch)
        run.put_peer(
            "update", (s / total for s in timed["single"]), (s / total for s in timed["torch"])
        )
        return statistics.median(timed["host"]) / statistics.median(timed["both"])


def _pattern(sizes: Sequence[int], stride: int, *, mirrored: bool = False) -> UpdatePattern:
    return UpdatePattern(groups=len(sizes), stride=stride, mirrored=mirrored)


def _named(stride: int) -> str:
    return UpdatePattern(groups=max(1, stride), stride=stride).describe()


def _update(one: InterleavedUpdater) -> None:
    one.step()
    one.settle()


def _link_for(rates: UpdateRates, size: int, stride: int) -> float:
    """Words a second at which the formula says ``stride``, in the middle of what says so."""

    def load(words: float) -> float:
        there = rates.model_copy(update={"link": words})
        return there.device_s(size) / there.host_s(size)

    low, high = 1e3, 1e12
    wanted = stride - 1.5  # k = 1 + ceil(load), so load is in (k - 2, k - 1]
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if load(middle) > wanted else (low, middle)
    return low


def predicted_limit(rates: UpdateRates) -> float:
    """How many times faster all resources together could be at most: no way takes any time."""
    host = 1 / rates.host + 1 / rates.convert
    return 1 + host * rates.device


def _exact(seed: int, as_baseline: bool) -> tuple[int, float]:
    """(numbers that are not AdamW's after ten steps, most state on the device over two slots)."""
    import torch

    from shoal.memory.offload.interleaved import InterleavedUpdater
    from shoal.memory.tiers.tier import BudgetedTier

    rule = AdamW(lr=1e-3, fused=False)
    size, groups = 1000, 9
    source = torch.Generator().manual_seed(seed)
    start = torch.randn(1, size * groups - 7, generator=source)
    wrong, share = 0, 0.0
    patterns = [(HOST_ONLY, False), (2, False), (3, False), (2, True), (4, True)]
    for stride, mirrored in patterns[:1] if as_baseline else patterns:
        own = torch.nn.Parameter(start.clone())
        device = BudgetedTier("device", 2**22)
        made = InterleavedUpdater(
            {"w": own},
            rule,
            sub_group=size,
            pattern=functools.partial(_pattern, stride=stride, mirrored=mirrored),
            device=device,
            host=BudgetedTier("host", 2**22),
        )
        theirs = torch.nn.Parameter(start.clone())
        torchs = torch.optim.AdamW(
            [theirs], lr=rule.lr, betas=(rule.beta1, rule.beta2), eps=rule.eps,
            weight_decay=rule.weight_decay, foreach=False,
        )  # fmt: skip
        draws = torch.Generator().manual_seed(seed + 1)
        for _ in range(_EXACT_STEPS):
            gradient = torch.randn(start.shape, generator=draws)
            own.grad, theirs.grad = gradient, gradient.clone()
            made.take_gradients()
            made.step()
            torchs.step()
        state = made.state()["w"]
        wrong += int((own != theirs).sum())
        wrong += sum(
            int((state[key] != torchs.state[theirs][key]).sum())
            for key in ("exp_avg", "exp_avg_sq")
        )
        wrong += sum(count != _EXACT_STEPS for count in made.updated)
        block = device.rounded(4 * size)
        gradients = block * sum(made.pattern.on_device())
        share = max(share, (device.stats.peak - gradients) / (2 * 3 * block))
        made.close()
    return wrong, share
