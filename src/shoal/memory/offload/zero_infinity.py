"""ZeRO-Infinity: every state of every parameter in device, host or disk memory, divided by rank.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, sections 3 (sizes), 4 (bandwidth), 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge, Le

from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.core.sizes import Size
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.ir import Estimate, Interval, Machine, TrainJob, Work
from shoal.memory.offload.options import (
    LEAST_BUDGET,
    UNLIMITED,
    Count,
    check_least,
    place_of,
    refuse_streamed,
    short_budgets,
)
from shoal.memory.streaming.needs import (
    HOST_OF_A_GPU,
    MemoryNeeds,
    disk_bandwidth,
    efficiency,
    needs,
    peak_flops,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.protocols import TieredModel


@part
class ZeroInfinity:
    """Keep parameters, gradients and optimizer state in host memory or on disk.

    A layer's parameters are fetched when a pass needs them, and prefetched once the order is known;
    gradients are offloaded as they are computed; the optimizer updates state on slow tiers in
    sub-groups. Losses and parameters equal those of the run without offloading, bit for bit.

    Args:
        device_budget: bytes of device memory that a step may use; all of it if not given.
        host_budget: bytes of host memory; if not given, as much as needed, and with ``act: host``
            three quarters of the host's total.
        param: where parameters are stored: host or disk.
        optim: where gradients and optimizer state are stored: host or disk.
        act: where saved activations are stored: device or host.
        sub_group_numel: largest number of elements of a parameter that are updated at once.
        prefetch_numel: number of elements to prefetch; 0 for none.
        tiling: split linear layers that do not fit on the device: auto, none, or the number of
            tiles.
        placement: sharded: every rank has a shard of every parameter; owner: one rank has the whole
            parameter and broadcasts it.
        min_efficiency: smallest planned share of computation in a step.
        path: directory for state on disk; that of the run if not given.
    """

    device_budget: Size | None = None
    host_budget: Size | None = None
    param: Literal["host", "disk"] = "disk"
    optim: Literal["host", "disk"] = "disk"
    act: Literal["device", "host"] = "device"
    sub_group_numel: Count = 10_000_000
    prefetch_numel: Count = 10_000_000
    tiling: Literal["auto", "none"] | int = "none"
    placement: Literal["sharded", "owner"] = "sharded"
    min_efficiency: Annotated[float, Ge(0), Le(1)] = 0.5
    path: str = ""

    def __post_init__(self) -> None:
        where = "offload.zero_infinity"
        check_least(
            self,
            where,
            device_budget=LEAST_BUDGET,
            host_budget=LEAST_BUDGET,
            sub_group_numel=2**14,
            prefetch_numel=0,
        )
        require(
            isinstance(self.tiling, str) or self.tiling >= 2,
            f"{where}.tiling",
            self.tiling,
            expected="auto, none, or a number of tiles from 2",
        )

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """All in host memory, all on disk, and activations in host memory too."""
        yield cls(param="host", optim="host")
        yield cls()
        yield cls(act="host")

    def check(self, job: TrainJob) -> None:
        """Refuse what this does not compose with."""
        refuse_streamed(job, "zero_infinity")
        split = job.parallel.tp * job.parallel.pp * job.parallel.cp
        if self.tiling != "none" and split > 1:
            raise ConfigError(
                f"offload.zero_infinity.tiling = {self.tiling}: tp, pp and cp have cut the layers "
                "already; use tiling: none"
            )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes by tier, and the seconds for which a step waits for disk, link and host.

        Parameters come while passes compute, as far as these last; the update's traffic is the
        disk's alone, and beside a GPU the host updates.
        """
        need = self._needs(work)
        bandwidth = disk_bandwidth(machine)
        shown = flops_per_token(work.shape, work.job.seq_len) * work.job.global_batch
        shown *= work.job.seq_len / work.job.parallel.world / peak_flops(work, machine)
        fetched = need.fetched / bandwidth
        seconds = (need.read + need.written) / bandwidth
        update: dict[str, float] = {}
        if machine.device.kind != "cpu":
            fetched = max(fetched, need.moved / copy_bytes_per_s(machine))
            update["optimizer"] = parameters(work.shape) / work.job.parallel.world / HOST_OF_A_GPU
        terms = {"memory": seconds + max(0.0, fetched - shown), **update}
        return Estimate(
            step_s=Interval.around(sum(terms.values()), 0.5),
            terms_s=terms,
            memory_bytes={"device": need.device, "host": need.host, "disk": need.disk},
        )

    def _needs(self, work: Work) -> MemoryNeeds:
        need = needs(
            work,
            param=self.param,
            optim=self.optim,
            act=self.act,
            sub_group_numel=self.sub_group_numel,
            prefetch_numel=self.prefetch_numel,
        )
        if self.device_budget is None:
            return need
        # What comes early takes no more than is left.
        least = needs(
            work,
            param=self.param,
            optim=self.optim,
            act=self.act,
            sub_group_numel=self.sub_group_numel,
            prefetch_numel=0,
        ).device
        return replace(need, device=max(least, min(need.device, self.device_budget)))

    def notes(self, work: Work, machine: Machine) -> tuple[str, ...]:
        """What a plan should say: budgets that are too small, tiers that are too slow."""
        need, job = self._needs(work), work.job
        notes = [*short_budgets(self, {"device": need.device, "host": need.host})]
        tokens = job.seq_len * job.global_batch / job.parallel.dp
        for what, intensity, tier in (
            ("parameters and gradients", tokens, self.param),
            ("optimizer states", tokens / 4, self.optim),
        ):
            share = efficiency(intensity, disk_bandwidth(machine), peak_flops(work, machine))
            if tier == "disk" and share < self.min_efficiency:
                notes.append(
                    f"offload: with {what} on disk at most {share:.0%} of a step computes, below "
                    f"min_efficiency {self.min_efficiency:.0%}; use a larger batch, a faster disk "
                    "or host memory"
                )
        return tuple(notes)

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
        """Move a model's state into tiers."""
        from shoal.memory.streaming.build import TierAssignment, offloaded

        wanted = TierAssignment(
            device_bytes=self.device_budget or UNLIMITED,
            host_bytes=self.host_budget,
            param=self.param,
            optim=self.optim,
            act=self.act,
            sub_group_numel=self.sub_group_numel,
            prefetch_numel=self.prefetch_numel,
            owner=self.placement == "owner",
            tiles={"none": 1, "auto": 0}[self.tiling]
            if isinstance(self.tiling, str)
            else self.tiling,
            path=place_of(self.path, place),
        )
        return offloaded(model, comm, optimizer, wanted, device=device, values=values)
