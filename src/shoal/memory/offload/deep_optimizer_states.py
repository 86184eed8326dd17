"""Deep Optimizer States: the optimizer's state on the host, updated by host and device together.

Source: Maurya et al., Deep Optimizer States, 2024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.core.sizes import Size
from shoal.core.traits import traits
from shoal.cost.arithmetic import parameters
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.cost.price.ops import stage_share
from shoal.ir import Estimate, Interval, Machine, TrainJob, Work
from shoal.memory.offload.options import LEAST_BUDGET, Count, check_least, refuse, short_budgets
from shoal.memory.streaming.needs import HOST_OF_A_GPU, needs
from shoal.plan.memory.stride import HOST_ONLY, SLOTS, UpdatePattern, UpdateRates, choose, timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.protocols import TieredModel

_UPDATE_BYTES = 28
_SECTOR = 4096
# Sub-groups of an update that an estimate plays.
_PLAYED = 200
# No time at all: weights in training are fp32, and nothing is converted.
_NO_TIME = 1e18


@part
class DeepOptimizerStates:
    """Keep weights on the device, and moments and fp32 master weights on the host.

    Choose it where weights and gradients fit and the optimizer state does not. Losses and
    parameters equal those of the run without offloading, bit for bit, with ``fused: false`` of the
    optimizer.

    Args:
        device_budget: bytes of device memory that a step may use; all of it if not given.
        host_budget: bytes of host memory; all of it if not given.
        sub_group_numel: elements of a sub-group; the device holds two sub-groups.
        stride: one in ``stride`` sub-groups is updated on the device; auto simulates every stride
            with rates measured at the start; 0 uses the host alone.
        static_residents: number of last sub-groups whose state stays on the device.
    """

    device_budget: Size | None = None
    host_budget: Size | None = None
    sub_group_numel: Count = 10_000_000
    stride: Literal["auto"] | int = "auto"
    static_residents: int = 0

    def __post_init__(self) -> None:
        where = "offload.deep_optimizer_states"
        check_least(
            self,
            where,
            device_budget=LEAST_BUDGET,
            host_budget=LEAST_BUDGET,
            sub_group_numel=1,
            static_residents=0,
        )
        require(
            self.stride == "auto" or self.stride == HOST_ONLY or self.stride >= 2,
            f"{where}.stride",
            self.stride,
            expected="auto, 0 for the host alone, or at least 2",
            hint="a stride of 1 is all of it on the device: leave offload out",
        )

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """As it is: it chooses its stride by what is measured."""
        yield cls()

    def check(self, job: TrainJob) -> None:
        """Refuse what this does not compose with."""
        if traits("shard", job.shard):
            raise ConfigError(
                f"offload: deep_optimizer_states keeps whole weights on every rank and shard is "
                f"{job.shard}; leave shard out"
            )
        refuse(job, "deep_optimizer_states")

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes by tier, and the seconds of an update by the machine's bandwidths."""
        split = work.job.parallel
        count = parameters(work.shape) * stage_share(work.shape, split.pp) / split.tp
        size = min(self.sub_group_numel, int(count))
        groups = -(-int(count) // size)
        few = min(groups, _PLAYED)  # the rest goes on as these do
        seconds, chosen = _played(self, size, few, _rates(machine))
        seconds *= groups / few
        moving = sum(chosen.on_device()) - chosen.residents
        passes = needs(
            work, param="host", optim="host", act="device", sub_group_numel=2**14, prefetch_numel=0
        )
        # Weights and gradients, and of weights in bf16 what they are computed with.
        whole = (10.0 if work.job.precision == "bf16" else 8.0) * count
        # Of every sub-group value, gradient and moments begin at a sector.
        host = 16.0 * count + 4 * groups * _SECTOR
        groups_there = 12.0 * size * (min(SLOTS, moving) + chosen.residents)
        return Estimate(
            step_s=Interval.around(seconds, 0.5),
            terms_s={"optimizer": seconds},
            memory_bytes={"device": whole + groups_there + passes.device, "host": host},
        )

    def notes(self, work: Work, machine: Machine) -> tuple[str, ...]:
        """What a plan should say: budgets that are too small."""
        return short_budgets(self, self.estimate(work, machine).memory_bytes)

    def _pattern(self, sizes: Sequence[int], rates: UpdateRates) -> tuple[float, UpdatePattern]:
        """(seconds, who updates what) of the choice."""
        residents = min(self.static_residents, len(sizes))
        if self.stride == "auto":
            best, _ = choose(rates, sizes, residents=residents)
            return best.seconds, best.pattern
        # Fewer sub-groups than a stride asks for are the host's.
        fits = self.stride <= len(sizes) - residents
        chosen = UpdatePattern(
            groups=len(sizes), stride=self.stride if fits else HOST_ONLY, residents=residents
        )
        return timeline(rates, sizes, chosen).seconds, chosen

    def apply(
        self,
        model: nn.Module,
        comm: Comm,
        optimizer: object,
        *,
        place: Path,
        device: torch.device | str = "cpu",
        values: Callable[[str], Tensor] | None = None,
    ) -> TieredModel:
        """Move the optimizer's state to the host."""
        from shoal.memory.offload.interleaved import Workers, rates_of
        from shoal.memory.offload.interleaved_model import interleaved_model
        from shoal.memory.streaming.subgroups import elementwise

        rule = elementwise(optimizer, "offload: deep_optimizer_states")
        dtype = next(model.parameters()).dtype
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)

        def pattern(sizes: Sequence[int]) -> UpdatePattern:
            rates = rates_of(
                min(self.sub_group_numel, total), rule, Workers(), device=device, dtype=dtype
            )
            return self._pattern(sizes, rates)[1]

        return interleaved_model(
            model,
            comm,
            rule,
            pattern=pattern,
            sub_group=min(self.sub_group_numel, total),
            device=device,
            device_bytes=self.device_budget,
            host_bytes=self.host_budget,
            values=values,
        )


@functools.lru_cache(maxsize=256)
def _played(
    part: DeepOptimizerStates, size: int, few: int, rates: UpdateRates
) -> tuple[float, UpdatePattern]:
    """(seconds, who updates what) of equal sub-groups; a search asks for the same many times."""
    return part._pattern([size] * few, rates)


def _rates(machine: Machine) -> UpdateRates:
    """What the machine's bandwidths allow: an update reads 16 and writes 12 bytes a parameter."""
    own = machine.device.main_memory.read_bandwidth or 1e10
    gpu = machine.device.kind != "cpu"
    return UpdateRates(
        host=HOST_OF_A_GPU if gpu else own / _UPDATE_BYTES,
        device=own / _UPDATE_BYTES,
        convert=_NO_TIME,
        link=copy_bytes_per_s(machine) / 4,
        push=1.0,
    )
